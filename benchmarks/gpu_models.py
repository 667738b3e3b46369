"""The checkpoints of the GPU benchmark, with random weights drawn on the device."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from common.contract.plan import Grid
from demo.checkpoint import TINY, Shape, make_config, make_tokenizer, randomise, save_checkpoint


@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint and the sizes to measure it with.

    grids: videos whose prefill is compared with and without pruning. shared: each video of concurrent requests.
    short: a single short video for the tower; uneven: a video whose forwards match no token budget exactly.
    side: of the square matrices whose product measures peak arithmetic.
    """

    shape: Shape
    vocabulary: int | None
    grids: tuple[Grid, ...]
    shared: Grid
    short: Grid
    uneven: Grid
    side: int
    copied_bytes: int
    blocks: int


# Qwen/Qwen2.5-VL-7B-Instruct's sizes.
SEVEN_BILLION = Shape(
    merges=320,
    hidden=3584,
    layers=28,
    heads=28,
    kv_heads=4,
    intermediate=18944,
    mrope_section=(16, 24, 24),
    rope_theta=1e6,
    tie_word_embeddings=False,
    tower_hidden=1280,
    tower_depth=32,
    tower_heads=16,
    tower_intermediate=3420,
    window_px=112,
    full_attention_blocks=(7, 15, 23, 31),
    min_pixels=56 * 56,
    max_pixels=448 * 448,
    init_range=0.02,
    context_tokens=128_000,
)
TARGETS: Mapping[str, Target] = {
    "7b": Target(
        SEVEN_BILLION,
        152_064,
        grids=(Grid(32, 16, 16), Grid(64, 16, 16)),
        shared=Grid(8, 16, 16),
        short=Grid(8, 8, 8),
        uneven=Grid(6, 9, 11),
        side=8192,
        copied_bytes=2**32,
        blocks=8192,
    ),
    # To try the benchmark itself, on any processor.
    "tiny": Target(
        replace(TINY, context_tokens=4096),
        None,
        grids=(Grid(8, 4, 4),),
        shared=Grid(2, 4, 4),
        short=Grid(2, 4, 4),
        uneven=Grid(2, 3, 5),
        side=256,
        copied_bytes=2**20,
        blocks=512,
    ),
}


@contextmanager
def written(target: Target, device: torch.device, dtype: torch.dtype) -> Iterator[Path]:
    """A temporary folder with the target's checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(target.shape)
        config: Any = make_config(target.shape, tokenizer)
        config.text_config.vocab_size = target.vocabulary or config.text_config.vocab_size
        config.dtype = dtype
        with torch.device(device):
            model = Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=dtype)
            randomise(model, target.shape.init_range, seed=0)
        save_checkpoint(Path(folder), model, tokenizer, target.shape)
        del model
        yield Path(folder)
