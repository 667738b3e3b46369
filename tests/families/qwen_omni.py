"""Qwen2.5-Omni's thinker."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5OmniThinkerConfig, Qwen2_5OmniThinkerForConditionalGeneration

from demo.checkpoint import TINY, make_tokenizer
from tests.families.family import ROPE, TEXT, FamilyUnderTest, save

# As published, with line breaks.
_CHAT_TEMPLATE = """\
{% for message in messages %}
{%- if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}
{%- else %}
{%- for content in message['content'] %}
{%- if content['type'] == 'image' or 'image' in content or 'image_url' in content -%}
<|vision_bos|><|IMAGE|><|vision_eos|>
{%- elif content['type'] == 'audio' or 'audio' in content or 'audio_url' in content -%}
<|audio_bos|><|AUDIO|><|audio_eos|>
{%- elif content['type'] == 'video' or 'video' in content %}<|vision_bos|><|VIDEO|><|vision_eos|>
{%- elif 'text' in content %}{{ content['text'] }}
{%- endif %}
{%- endfor %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
MEDIA_TOKENS = (
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
)
MELS, LONGEST_S = 16, 12
_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
    "out_hidden_size": TEXT["hidden_size"],
    "fullatt_block_indexes": [1],
}
_AUDIO = {
    "num_mel_bins": MELS,
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "n_window": 20,
    "output_dim": TEXT["hidden_size"],
}
_PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 168 * 168}


def write_qwen2_5_omni(folder: Path, seed: int) -> Path:
    tokenizer = make_tokenizer(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": list(MEDIA_TOKENS)})
    tokenizer.chat_template = _CHAT_TEMPLATE
    ids = tokenizer.get_vocab()
    config = Qwen2_5OmniThinkerConfig(
        text_config={
            **TEXT,
            "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]},
            "vocab_size": len(tokenizer),
            "tie_word_embeddings": False,
        },
        vision_config=_VISION,
        audio_config=_AUDIO,
        image_token_index=ids["<|IMAGE|>"],
        video_token_index=ids["<|VIDEO|>"],
        audio_token_index=ids["<|AUDIO|>"],
        vision_start_token_id=ids["<|vision_bos|>"],
        vision_end_token_id=ids["<|vision_eos|>"],
        audio_start_token_id=ids["<|audio_bos|>"],
        audio_end_token_id=ids["<|audio_eos|>"],
        tie_word_embeddings=False,
    )
    image: Mapping[str, Any] = {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "patch_size": 14,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": _PIXELS,
    }
    sound = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": MELS,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": LONGEST_S,
        "return_attention_mask": True,
    }
    both = {
        **image,
        **sound,
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5OmniProcessor",
    }
    video = {**image, "video_processor_type": "Qwen2VLVideoProcessor"}
    return save(folder, seed, Qwen2_5OmniThinkerForConditionalGeneration(config), tokenizer, both, video)


def write_published(folder: Path, thinker: Path) -> Path:
    """The checkpoint of a whole model, with weights of parts that are not read, as they are published."""
    folder.mkdir(parents=True)
    for file in thinker.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            (folder / file.name).symlink_to(file)
    config = {"model_type": "qwen2_5_omni", "thinker_config": json.loads((thinker / "config.json").read_text())}
    (folder / "config.json").write_text(json.dumps(config | {"talker_config": {}, "token2wav_config": {}}))
    weights = {f"thinker.{name}": each for name, each in load_file(thinker / "model.safetensors").items()}
    others = {"talker.model.norm.weight": torch.ones(4), "token2wav.code2wav_dit_model.proj.bias": torch.ones(4)}
    save_file(weights | others, folder / "model.safetensors")
    return folder


FAMILIES = {
    "qwen2_5_omni": FamilyUnderTest(
        write_qwen2_5_omni,
        Qwen2_5OmniThinkerForConditionalGeneration,
        temporal_patch=2,
        text_prefix="model.",
        hears=True,
    ),
}
