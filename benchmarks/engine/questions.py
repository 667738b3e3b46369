"""The prompts of the engine benchmark. A prompt is a video's embeddings between two pieces of text.

Embeddings are random and different in every prompt, so nothing hits a cache; transformers gets the same ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import FrameShape, Grid, Int32Array, MediaPlan, Modality, PromptPlan, Run
from gridsieve.common.contract.retention import Pruning, num_kept
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.request.pruned_prompt import PrunedPrompt
from gridsieve.services.generation.request.request import Event, Request
from gridsieve.services.generation.sampling.detokenizer import Detokenizer
from gridsieve.services.generation.sampling.sampler import SamplingParams
from gridsieve.services.preprocessing.prompt.positions import GridSpan, TextSpan, positions_of

GRID = Grid(8, 10, 10)
BEFORE_TOKENS, AFTER_TOKENS = 14, 16  # of text; 830 tokens in all
TIME_STEP = Fraction(1)  # transformers yields the same positions as long as t is at most the grid's width
MERGED_PX = 28


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


def submit(
    engine: Engine,
    question: Question,
    params: SamplingParams,
    detokenizer: Detokenizer | None,
    dtype: torch.dtype,
    on_event: Callable[[Event], None],
) -> Request:
    """Submits a question with its media, if any, already encoded; nothing of it hits the prefix cache."""
    counts = [question.embeds.shape[1] for _ in question.plan.media]
    keys = [os.urandom(32) for _ in counts]
    request = Request("bench", PrunedPrompt(question.plan, counts), keys, params, detokenizer, on_event)
    engine.submit(request)
    for key in keys:
        engine.deliver(request, MediaItem(0, question.kept, question.embeds.to(dtype), 0, key))
    return request


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
