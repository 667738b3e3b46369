"""The checkpoints and prompts of the engine benchmark. A prompt is a video's embeddings between two pieces of text.

Embeddings are random and different in every prompt, so nothing hits a cache; transformers gets the same ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen2_5_VLForConditionalGeneration

from demo.checkpoint import Shape, make_config, make_tokenizer, randomise, save_checkpoint
from framesieve.common.checkpoint import DEMO_MODEL, Checkpoint
from framesieve.common.contract.plan import FrameShape, Grid, Int32Array, MediaPlan, Modality, PromptPlan, Run
from framesieve.common.contract.retention import Pruning, num_kept
from framesieve.services.preprocessing.prompt.positions import GridSpan, TextSpan, positions_of

GRID = Grid(8, 10, 10)
BEFORE_TOKENS, AFTER_TOKENS = 14, 16  # of text; 830 tokens in all
TIME_STEP = Fraction(1)  # transformers yields the same positions as long as t is at most the grid's width
MERGED_PX = 28

# The proportions of Qwen2.5-0.5B (hidden size 896, MLP 5.4 times that, heads of 64, tied) at a smaller size.
RANDOM = Shape(
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
)
RANDOM_VOCABULARY = 32_000


@dataclass(frozen=True, slots=True)
class Model:
    """A checkpoint. parameters: of the language model, tied ones once; small: goals apply to the other one only."""

    name: str
    folder: Path
    parameters: int
    small: bool


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt. embeds: float32 [1, K, D], of its video if it has one; kept: int32 [K], None if unpruned."""

    plan: PromptPlan
    kept: Int32Array | None
    embeds: Tensor

    @property
    def tokens(self) -> int:
        """The prompt's tokens after pruning."""
        return self.plan.tokens - sum(item.grid.tokens for item in self.plan.media) + self.embeds.shape[1]


@contextmanager
def models() -> Iterator[list[Model]]:
    """The demo's checkpoint, and a random one of about 60 M parameters, written to a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        parameters = _write_random(Path(folder))
        yield [
            Model("demo", DEMO_MODEL, _count(Qwen2_5_VLForConditionalGeneration.from_pretrained(DEMO_MODEL)), True),
            Model("random", Path(folder), parameters, False),
        ]


def _write_random(folder: Path) -> int:
    tokenizer = make_tokenizer(RANDOM)
    config: Any = make_config(RANDOM, tokenizer)
    config.text_config.vocab_size = RANDOM_VOCABULARY
    model = Qwen2_5_VLForConditionalGeneration(config)
    randomise(model, RANDOM.init_range, seed=0)
    save_checkpoint(folder, model, tokenizer, RANDOM)
    return _count(model)


def _count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.model.language_model.parameters())


def text_question(tokens: int, random: np.random.Generator) -> Question:
    """A prompt of `tokens` random text tokens. Of one generator, no two share a block of the prefix cache."""
    ids = random.integers(10, 300, tokens).astype(np.int32)
    plan = PromptPlan(ids, positions_of((TextSpan(tokens),)), (), 0, bytes(32))
    return Question(plan, None, torch.empty(1, 0, 0))


def question(checkpoint: Checkpoint, rate: float, seed: int) -> Question:
    """A prompt of 30 text tokens and a video. The kept tokens are random, which makes no difference to the engine."""
    random = np.random.default_rng(seed)
    config = checkpoint.config
    hidden = int((config.get("text_config") or config)["hidden_size"])
    ids = np.concatenate(
        [
            random.integers(10, 300, BEFORE_TOKENS),
            np.full(GRID.tokens, config["video_token_id"]),
            random.integers(10, 300, AFTER_TOKENS),
        ]
    )
    spans = (TextSpan(BEFORE_TOKENS), GridSpan(GRID, TIME_STEP), TextSpan(AFTER_TOKENS))
    media = MediaPlan(
        modality=Modality.VIDEO,
        grid=GRID,
        runs=(Run(BEFORE_TOKENS, GRID.tokens),),
        frames=FrameShape(2 * GRID.t, (MERGED_PX * GRID.h, MERGED_PX * GRID.w)),
        seconds_per_grid=TIME_STEP,
        timestamps_s=(),
        content_hash=random.bytes(32),
    )
    plan = PromptPlan(ids.astype(np.int32), positions_of(spans), (media,), 0, bytes(32))
    count = num_kept(GRID, Pruning(rate))
    kept = np.sort(random.choice(GRID.tokens, count, replace=False)).astype(np.int32) if rate else None
    return Question(plan, kept, torch.from_numpy(random.normal(0, 0.05, (1, count, hidden)).astype(np.float32)))
