"""The checkpoints of the benchmarks: layouts of published families, with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from demo.checkpoint import Shape, make_config, make_tokenizer, randomise, save_checkpoint

CPU = torch.device("cpu")
# What the configs of both layouts have.
_TEXT_NAMES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "bos_token_id",
    "eos_token_id",
)
_VISION_NAMES = (
    "depth",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "patch_size",
    "spatial_merge_size",
    "temporal_patch_size",
    "out_hidden_size",
)
_TOKEN_NAMES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


@dataclass(frozen=True, slots=True)
class DeepStack:
    """What Qwen3-VL's layout has beside a `Shape`. place_count: rows of the tower's table of places."""

    indexes: tuple[int, ...]
    place_count: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Recurrent:
    """What Qwen3.5's layout has beside a `Shape`. place_count: rows of the tower's table of places.

    rotary: the share of a head that is rotated. key_heads, value_heads, state_dim: of layers with a recurrent state,
    which are three of four.
    """

    place_count: int
    head_dim: int
    rotary: float
    key_heads: int
    value_heads: int
    state_dim: int


@dataclass(frozen=True, slots=True)
class Layout:
    """A checkpoint's sizes: Qwen2.5-VL's layout; with deepstack Qwen3-VL's, with recurrent Qwen3.5's.

    vocabulary: None: the tokenizer's.
    """

    shape: Shape
    vocabulary: int | None = None
    deepstack: DeepStack | None = None
    recurrent: Recurrent | None = None

    def parts(self) -> tuple[Any, Any]:
        """The checkpoint's config, and transformers' class of its model."""
        config: Any = make_config(self.shape, make_tokenizer(self.shape))
        config.text_config.vocab_size = self.vocabulary or config.text_config.vocab_size
        if self.recurrent:
            return _qwen3_5(config, self.recurrent), Qwen3_5ForConditionalGeneration
        if (deepstack := self.deepstack) is None:
            return config, Qwen2_5_VLForConditionalGeneration
        text = {name: getattr(config.text_config, name) for name in _TEXT_NAMES}
        rope = {**config.text_config.rope_parameters, "mrope_interleaved": True}
        vision = {name: getattr(config.vision_config, name) for name in _VISION_NAMES}
        qwen3_vl = Qwen3VLConfig(
            text_config={**text, "head_dim": deepstack.head_dim, "rope_parameters": rope},
            vision_config={
                **vision,
                "deepstack_visual_indexes": list(deepstack.indexes),
                "num_position_embeddings": deepstack.place_count,
            },
            **{name: getattr(config, name) for name in _TOKEN_NAMES},
            tie_word_embeddings=self.shape.tie_word_embeddings,
        )
        return qwen3_vl, Qwen3VLForConditionalGeneration

    def drawn(self, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Any:
        """transformers' model, its weights drawn on the device."""
        config, model_class = self.parts()
        config.dtype = dtype
        with torch.device(device):
            model = model_class._from_config(config, dtype=dtype)
            randomise(model, self.shape.init_range, seed=0)
        return model.eval()

    def save(self, whole: Any, folder: Path) -> Path:
        """The folder of a checkpoint of a model that was drawn."""
        save_checkpoint(folder, whole, make_tokenizer(self.shape), self.shape)
        if self.recurrent or self.deepstack:
            for name, processor in (
                ("preprocessor", {"image_processor_type": "Qwen2VLImageProcessor"}),
                ("video_preprocessor", {"video_processor_type": "Qwen3VLVideoProcessor"}),
            ):
                path = folder / f"{name}_config.json"
                settings = json.loads(path.read_text()) | {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
                path.write_text(json.dumps(settings | {"processor_class": "Qwen3VLProcessor", **processor}))
        return folder


def _qwen3_5(config: Any, recurrent: Recurrent) -> Any:
    """The config of Qwen3.5 with the sizes of one of Qwen2.5-VL."""
    half = int(recurrent.head_dim * recurrent.rotary) // 2
    rope = {
        "rope_type": "default",
        "rope_theta": config.text_config.rope_parameters["rope_theta"],
        "partial_rotary_factor": recurrent.rotary,
        "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        "mrope_interleaved": True,
    }
    text = {name: getattr(config.text_config, name) for name in _TEXT_NAMES}
    states = {f"linear_{kind}_head_dim": recurrent.state_dim for kind in ("key", "value")}
    states |= {"linear_num_key_heads": recurrent.key_heads, "linear_num_value_heads": recurrent.value_heads}
    vision = {name: getattr(config.vision_config, name) for name in _VISION_NAMES}
    return Qwen3_5Config(
        text_config={**text, **states, "head_dim": recurrent.head_dim, "rope_parameters": rope},
        vision_config={**vision, "num_position_embeddings": recurrent.place_count},
        **{name: getattr(config, name) for name in _TOKEN_NAMES},
        tie_word_embeddings=config.tie_word_embeddings,
    )


# The proportions of Qwen2.5-0.5B (hidden size 896, MLP 5.4 times that, heads of 64, tied) at a smaller size: about
# 60 M parameters.
RANDOM = Layout(
    Shape(
        merges=320,
        hidden=512,
        layers=9,
        heads=8,
        kv_heads=2,
        intermediate=2752,
        mrope_section=(8, 12, 12),
        rope_theta=1e6,
        tie_word_embeddings=True,
        tower_hidden=64,
        tower_depth=1,
        tower_heads=2,
        tower_intermediate=128,
        window_px=56,
        full_attention_blocks=(0,),
        min_pixels=56 * 56,
        max_pixels=280 * 280,
        init_range=0.04,
    ),
    vocabulary=32_000,
)
# The same text model, and a tower of the proportions of Qwen2.5-VL's.
SMALL = replace(
    RANDOM,
    shape=replace(
        RANDOM.shape,
        tower_hidden=320,
        tower_depth=8,
        tower_heads=4,
        tower_intermediate=864,
        window_px=112,
        full_attention_blocks=(1, 3, 5, 7),
        max_pixels=320 * 280,
    ),
)
# The same sizes in Qwen3-VL's layout, whose slices have timestamps. Its budget of pixels is that of all frames.
SMALL_QWEN3_VL = replace(
    SMALL,
    shape=replace(SMALL.shape, min_pixels=4 * SMALL.shape.min_pixels, max_pixels=16 * SMALL.shape.max_pixels),
    deepstack=DeepStack((1, 3), place_count=400, head_dim=64),
)
# The same tower, and a text model in Qwen3.5's layout with as many parameters: six layers with a recurrent state, two
# with attention.
SMALL_RECURRENT = replace(
    SMALL_QWEN3_VL,
    shape=replace(SMALL_QWEN3_VL.shape, layers=8),
    deepstack=None,
    recurrent=Recurrent(place_count=400, head_dim=64, rotary=0.5, key_heads=4, value_heads=8, state_dim=64),
)
# Sizes of Qwen/Qwen2.5-VL-3B-Instruct, from its config.json.
QWEN2_5_VL_3B = Layout(
    replace(
        RANDOM.shape,
        hidden=2048,
        layers=36,
        heads=16,
        kv_heads=2,
        intermediate=11008,
        mrope_section=(16, 24, 24),
        tower_hidden=1280,
        tower_depth=32,
        tower_heads=16,
        tower_intermediate=3420,
        window_px=112,
        full_attention_blocks=(7, 15, 23, 31),
        max_pixels=320 * 280,
        init_range=0.02,
    ),
    vocabulary=151_936,
)
