"""The demo model in the layout of Qwen2.5-Omni's thinker: with a small sound tower, which `demo.tones` trains.

Tower and language model begin with the demo model's weights. A sound has a frame of features each 1/16 s and so four
tokens a second, where published checkpoints have 25; a video counts as many positions a second, as in those.
Source: the files of Qwen/Qwen2.5-Omni-7B, as transformers writes those of the thinker alone; arXiv 2503.20215.
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5OmniThinkerConfig,
    Qwen2_5OmniThinkerForConditionalGeneration,
)

from demo.checkpoint import CHAT_TEMPLATE, DEMO, save_checkpoint
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.services.preprocessing.sound.features import LogMel

# The names that this layout gives the demo's control tokens, and the control tokens that the layout adds.
RENAMED = {
    "<|vision_start|>": "<|vision_bos|>",
    "<|vision_end|>": "<|vision_eos|>",
    "<|image_pad|>": "<|IMAGE|>",
    "<|video_pad|>": "<|VIDEO|>",
}
AUDIO, AUDIO_BOS, AUDIO_EOS = "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"
POSITIONS_PER_SECOND, CHUNK_S = 4, 2
# Of a frame of features and of the time between two.
WINDOW, HOP = 2048, 1000
LONGEST_S = 60
# Twice the demo's positions a second: this is about its base, so that times turn the queries as far as before.
ROPE_THETA = 10_000.0
LOG_MEL = LogMel(16_000, 32, WINDOW, HOP, LONGEST_S * 16_000, padded=True)
SLICE_STEP = Fraction(POSITIONS_PER_SECOND)
_FRAMES_OF_CHUNK = CHUNK_S * LOG_MEL.rate // HOP
_SOUND: dict[str, Any] = {
    "num_mel_bins": LOG_MEL.mels,
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "n_window": _FRAMES_OF_CHUNK // 2,
    "output_dim": DEMO.hidden,
}
_HEARS = """\
{%- elif part['type'] == 'audio' or 'audio' in part or 'audio_url' in part -%}
<|audio_bos|><|AUDIO|><|audio_eos|>
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The demo's, with its control tokens renamed and those of sounds after all others."""
    text, template = (DEMO_MODEL / "tokenizer.json").read_text(), CHAT_TEMPLATE
    for old, new in RENAMED.items():
        text, template = text.replace(old, new), template.replace(old, new)
    known = AutoTokenizer.from_pretrained(DEMO_MODEL)
    special = [*(RENAMED.get(each, each) for each in known.all_special_tokens), AUDIO, AUDIO_BOS, AUDIO_EOS]
    before, video, after = template.partition("{%- elif part['type'] == 'video'")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text),
        eos_token=known.eos_token,
        pad_token=known.pad_token,
        additional_special_tokens=special,
        model_max_length=known.model_max_length,
        clean_up_tokenization_spaces=False,
        chat_template=before + _HEARS + video + after,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5OmniThinkerForConditionalGeneration:
    """With the demo model's weights; those of sound are random. float32."""
    demo = Qwen2_5_VLForConditionalGeneration.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    model = Qwen2_5OmniThinkerForConditionalGeneration(_config(demo.config, tokenizer)).float()
    own = model.state_dict()
    for name, weight in demo.state_dict().items():
        for own_name, part in _renamed(name, weight):
            own[own_name][: len(part)] = part
    for module in model.model.audio_tower.modules():
        # transformers begins with so small weights that the positions' vectors drown the features.
        if isinstance(module, nn.Conv1d | nn.Linear):
            module.reset_parameters()
    return model.train(False)


def _renamed(name: str, weight: Tensor) -> list[tuple[str, Tensor]]:
    """Weights of Qwen2.5-VL in this layout, whose vision tower has queries, keys and values apart."""
    if ".attn.qkv." not in name:
        return [(name, weight)]
    parts = zip("qkv", weight.chunk(3), strict=True)
    return [(name.replace(".qkv.", f".{letter}."), part) for letter, part in parts]


def _config(demo: Any, tokenizer: PreTrainedTokenizerFast) -> Qwen2_5OmniThinkerConfig:
    ids, text = tokenizer.get_vocab(), demo.text_config.to_dict()
    for name in ("model_type", "dtype"):
        text.pop(name, None)
    rope = {**text["rope_parameters"], "rope_theta": ROPE_THETA}
    vision = {name: each for name, each in demo.vision_config.to_dict().items() if name not in ("model_type", "dtype")}
    return Qwen2_5OmniThinkerConfig(
        text_config={**text, "rope_parameters": rope, "vocab_size": len(tokenizer)},
        vision_config=vision,
        audio_config=_SOUND,
        image_token_index=ids["<|IMAGE|>"],
        video_token_index=ids["<|VIDEO|>"],
        audio_token_index=ids[AUDIO],
        vision_start_token_id=ids["<|vision_bos|>"],
        vision_end_token_id=ids["<|vision_eos|>"],
        audio_start_token_id=ids[AUDIO_BOS],
        audio_end_token_id=ids[AUDIO_EOS],
        position_id_per_seconds=POSITIONS_PER_SECOND,
        seconds_per_chunk=CHUNK_S,
        tie_word_embeddings=True,
    )


def save(folder: Path, model: Any, tokenizer: PreTrainedTokenizerFast) -> None:
    """The checkpoint, with weights in float16 that are read as float32."""
    save_checkpoint(folder, model, tokenizer, DEMO)
    weights = folder / "model.safetensors"
    save_file({name: each.half() for name, each in load_file(weights).items()}, weights, {"format": "pt"})
    weights.chmod(0o644)
    path = folder / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | {
        "chunk_length": LONGEST_S,
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": LOG_MEL.mels,
        "hop_length": HOP,
        "n_fft": WINDOW,
        "processor_class": "Qwen2_5OmniProcessor",
        "return_attention_mask": True,
        "sampling_rate": LOG_MEL.rate,
    }
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")
