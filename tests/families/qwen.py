"""Qwen's families."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3OmniMoeThinkerConfig,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from demo.checkpoint import TINY, make_tokenizer, write_checkpoint
from tests.families.family import ROPE, TEXT, FamilyUnderTest, save

Sizes = Mapping[str, Mapping[str, Any]]

QWEN2_VL: Sizes = {
    "text": {**TEXT, "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]}},
    "vision": {
        "depth": 3,
        "embed_dim": 32,
        "hidden_size": 64,
        "mlp_ratio": 2,
        "num_heads": 2,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
INTERLEAVED = {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
QWEN3_VL: Sizes = {
    "text": {**TEXT, "head_dim": 16, "rope_parameters": INTERLEAVED},
    "vision": {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
        "out_hidden_size": 64,
    },
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": []}
# Qwen3-Omni's sound tower, whose attention sees two chunks of 100 frames, and the tokens around sounds.
_SOUND = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "output_dim": 64,
    "downsample_hidden_size": 8,
    "n_window_infer": 200,
}
_SOUND_TOKENS = {
    "audio_start_token_id": "<|audio_start|>",
    "audio_token_id": "<|audio_pad|>",
    "audio_end_token_id": "<|audio_end|>",
}
# Attention layers between others with a recurrent state, twice as many value heads as key heads.
QWEN3_5: Sizes = {
    "text": {
        **TEXT,
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "rope_parameters": {**INTERLEAVED, "partial_rotary_factor": 0.5},
    },
    "vision": {name: size for name, size in QWEN3_VL["vision"].items() if name != "deepstack_visual_indexes"},
}
EXPERTS_3_5 = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}


def _write(
    folder: Path,
    seed: int,
    classes: tuple[Any, Any],
    sizes: Sizes,
    text: Mapping[str, Any] = {},
    pixels: tuple[Any, Any] = ((64 * 64, 192 * 192), (4 * 64 * 64, 16 * 128 * 128)),
    name: str = "Qwen3VL",
    change: Callable[[Any], object] = id,
    others: Mapping[str, Any] = {},
) -> Path:
    """classes: of config and model. text: what differs in the text config. pixels: least and most of images and videos.

    name: that the classes of processors begin with. change: of the tokenizer. others: fields of the config.
    """
    tokenizer = make_tokenizer(TINY)
    change(tokenizer)
    ids = tokenizer.get_vocab()
    config_class, model_class = classes
    config = config_class(
        text_config={**sizes["text"], **text, "vocab_size": len(tokenizer)},
        vision_config=sizes["vision"],
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        **others,
    )
    image, video = (
        {
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "patch_size": sizes["vision"]["patch_size"],
            "merge_size": 2,
            "temporal_patch_size": 2,
            "processor_class": f"{name}Processor",
            "size": {"shortest_edge": least, "longest_edge": most},
        }
        for least, most in pixels
    )
    image["image_processor_type"], video["video_processor_type"] = "Qwen2VLImageProcessor", f"{name}VideoProcessor"
    return save(folder, seed, model_class(config), tokenizer, image, video)


def _write_qwen2_vl(folder: Path, seed: int) -> Path:
    pixels = (56 * 56, 168 * 168)
    classes = Qwen2VLConfig, Qwen2VLForConditionalGeneration
    return _write(folder, seed, classes, QWEN2_VL, pixels=(pixels, pixels), name="Qwen2VL")


def _write_qwen3_vl(folder: Path, seed: int, **text: Any) -> Path:
    return _write(folder, seed, (Qwen3VLConfig, Qwen3VLForConditionalGeneration), QWEN3_VL, text)


def write_qwen3_vl_reader(folder: Path, seed: int, module: str) -> Path:
    """An embedder ("Pooling") or a reranker ("LogitScore") as Sentence Transformers publishes it: `write` of the family
    with a list of modules, a word for "yes" and for "no", and a tokenizer that ends each text with a token."""

    def change(tokenizer: Any) -> None:
        tokenizer.add_tokens(["yes", "no"])
        end = "<|endoftext|>", tokenizer.get_vocab()["<|endoftext|>"]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"$A {end[0]}", special_tokens=[end])

    _write(folder, seed, (Qwen3VLConfig, Qwen3VLForConditionalGeneration), QWEN3_VL, change=change)
    modules = [{"idx": 0, "type": "sentence_transformers.models.Transformer"}, {"idx": 1, "type": f"st.{module}"}]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


def write_qwen3_vl_heads(folder: Path, seed: int, heads: int, kv_heads: int, head_dim: int) -> Path:
    """`write` of the family with heads of a size that kernels for cards have, in two layers."""
    rope = {**INTERLEAVED, "mrope_section": [head_dim // 4, head_dim // 8, head_dim // 8]}
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    return _write_qwen3_vl(folder, seed, **sizes, num_hidden_layers=2, rope_parameters=rope)


def write_qwen3_vl_moe(folder: Path, seed: int, moe_intermediate: int = 48, text: Mapping[str, Any] = {}) -> Path:
    """`write` of the family with experts of this width. text: what else differs of its text config."""
    experts = {**EXPERTS, "moe_intermediate_size": moe_intermediate, **text}
    return _write(folder, seed, (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration), QWEN3_VL, experts)


def write_qwen3_omni_moe(folder: Path, seed: int) -> Path:
    """The thinker, with its sound tower."""
    ids: dict[str, int] = {}

    def change(tokenizer: Any) -> None:
        tokenizer.add_special_tokens({"additional_special_tokens": list(_SOUND_TOKENS.values())})
        ids.update({name: tokenizer.get_vocab()[token] for name, token in _SOUND_TOKENS.items()})
        video = "{%- elif part['type'] == 'video'"
        sound = "{%- elif part['type'] == 'audio' or 'audio' in part -%}\n<|audio_start|><|audio_pad|><|audio_end|>\n"
        tokenizer.chat_template = tokenizer.chat_template.replace(video, sound + video)

    _write(
        folder,
        seed,
        (Qwen3OmniMoeThinkerConfig, Qwen3OmniMoeThinkerForConditionalGeneration),
        QWEN3_VL,
        {**EXPERTS, "moe_intermediate_size": 48},
        pixels=((64 * 64, 192 * 192), (64 * 64, 128 * 128)),
        name="Qwen2VL",
        change=change,
        others={"audio_config": _SOUND, "position_id_per_seconds": 12},
    )
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": _SOUND["num_mel_bins"]}
    for file, added in (("config.json", ids), ("preprocessor_config.json", extractor)):
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | added))
    return folder


def write_qwen3_5(folder: Path, seed: int, text: Mapping[str, Any] | None = None) -> Path:
    """text: what differs of its text config."""
    return _write(folder, seed, (Qwen3_5Config, Qwen3_5ForConditionalGeneration), QWEN3_5, text or {})


_QWEN3: dict[str, Any] = {"patch_px": 16, "temporal_patch": 2, "slices_stand_alone": True}
FAMILIES = {
    "qwen2_vl": FamilyUnderTest(
        _write_qwen2_vl, Qwen2VLForConditionalGeneration, temporal_patch=2, text_prefix="model."
    ),
    "qwen2_5_vl": FamilyUnderTest(
        lambda folder, seed: write_checkpoint(folder, TINY, seed),
        Qwen2_5_VLForConditionalGeneration,
        temporal_patch=2,
        text_prefix="model.",
    ),
    "qwen3_vl": FamilyUnderTest(_write_qwen3_vl, Qwen3VLForConditionalGeneration, levels=2, **_QWEN3),
    "qwen3_vl_moe": FamilyUnderTest(write_qwen3_vl_moe, Qwen3VLMoeForConditionalGeneration, levels=2, **_QWEN3),
    "qwen3_5": FamilyUnderTest(write_qwen3_5, Qwen3_5ForConditionalGeneration, **_QWEN3),
    "qwen3_5_moe": FamilyUnderTest(
        partial(
            _write,
            classes=(Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
            sizes=QWEN3_5,
            text=EXPERTS_3_5,
        ),
        Qwen3_5MoeForConditionalGeneration,
        **_QWEN3,
    ),
    "qwen3_omni_moe": FamilyUnderTest(
        write_qwen3_omni_moe,
        Qwen3OmniMoeThinkerForConditionalGeneration,
        patch_px=16,
        temporal_patch=2,
        levels=2,
        text_prefix="model.",
    ),
}
