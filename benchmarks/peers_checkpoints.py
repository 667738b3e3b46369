"""The two checkpoints of `make bench-peers`, with random weights: a small one and one of a published model's sizes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from benchmarks.engine_models import RANDOM, RANDOM_VOCABULARY
from demo.checkpoint import Shape, make_config, make_tokenizer, randomise, save_checkpoint

# The text model of the engine's benchmark and a tower of the proportions of Qwen2.5-VL's.
SMALL = replace(
    RANDOM,
    tower_hidden=320,
    tower_depth=8,
    tower_heads=4,
    tower_intermediate=864,
    window_px=112,
    full_attention_blocks=(1, 3, 5, 7),
    max_pixels=320 * 280,
)
# Sizes of Qwen/Qwen2.5-VL-3B-Instruct, from its config.json.
LARGE = replace(
    RANDOM,
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
)
LARGE_VOCABULARY = 151_936


def checkpoint(folder: Path, name: str, dtype: str) -> Path:
    """The folder of a checkpoint, "small" or "3b", stored in `dtype`; written if it is not there."""
    path = folder / f"{name}-{dtype}"
    if not (path / "config.json").exists():
        print(f"writing {path}", file=sys.stderr)
        shape, vocabulary = (SMALL, RANDOM_VOCABULARY) if name == "small" else (LARGE, LARGE_VOCABULARY)
        _write(path, shape, vocabulary, getattr(torch, dtype))
    return path


def _write(folder: Path, shape: Shape, vocabulary: int, dtype: torch.dtype) -> None:
    tokenizer = make_tokenizer(shape)
    config: Any = make_config(shape, tokenizer)
    config.text_config.vocab_size = vocabulary
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # a copy in float32 would not fit beside it
    try:
        model = Qwen2_5_VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    randomise(model, shape.init_range, seed=0)
    save_checkpoint(folder, model, tokenizer, shape)
