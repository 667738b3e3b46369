"""Which tokens of a video are kept: score every token, keep the best, ties to the earlier.

It works on merged embeddings and knows neither towers nor requests. How many are kept is `common.retention`'s.
Source: Efficient Video Sampling, arXiv 2510.14624, embedding variant.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from common.plan import Grid
from common.retention import RANDOM, Pruning, retained_count

# In a still picture the differences are rounding noise: scores are multiples of this, so that two
# implementations of the formula keep the same tokens.
SCORE_STEP = 2.0**-16

# So that a long video takes a little memory beside its own.
_SCORED_AT_ONCE = 2**22  # values
_ROWS_AT_ONCE = 4096


def evs_scores(embeds: Tensor, grid: Grid) -> Tensor:
    """How much each token differs from the one at its place a slice earlier.

    embeds: (t·h·w, D), any float dtype; scored in float32.
    Returns float32 (t·h·w,), multiples of 2⁻¹⁶; slice 0 is +inf, NaN is −inf.
    """
    slices = embeds.view(grid.t, grid.slice_tokens, -1)
    scores = torch.full((grid.t, grid.slice_tokens), torch.inf, device=embeds.device)
    step = max(1, _SCORED_AT_ONCE // slices[0].numel())
    for start in range(1, grid.t, step):
        pairs = slices[start - 1 : start + step].float()
        change = 1 - F.cosine_similarity(pairs[1:], pairs[:-1], dim=-1)
        rounded = torch.round(change / SCORE_STEP) * SCORE_STEP
        scores[start : start + step] = torch.where(rounded.isnan(), -torch.inf, rounded)
    return scores.view(-1)


def random_scores(grid: Grid, seed: int) -> Tensor:
    """A random order of the tokens, the same for the same grid and seed: float32 (t·h·w,)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(grid.tokens, generator=generator).float()


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, ties to the earlier: int32 (count,), strictly increasing."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[:count].sort().values.to(torch.int32)


def keep_tokens(embeds: Tensor, grid: Grid, pruning: Pruning) -> Tensor:
    """Indices of the tokens of one video that `pruning` keeps.

    embeds: (t·h·w, D), any float dtype.
    Returns int32 (K,), strictly increasing, K = retained_count(grid, pruning).
    """
    count = retained_count(grid, pruning)
    if count == grid.tokens:
        return torch.arange(count, dtype=torch.int32, device=embeds.device)
    if pruning.method == RANDOM:
        return keep_best(random_scores(grid, pruning.seed or 0).to(embeds.device), count)
    return keep_best(evs_scores(embeds, grid), count)


def gather_in_place(embeds: Tensor, kept: Tensor) -> Tensor:
    """Moves the kept tokens to the front, since a second buffer of that size was not reserved.

    embeds: (levels, tokens, D), contiguous, overwritten; kept: int (K,), strictly increasing.
    Returns a view of it, (levels · K, D): each level's kept tokens, level by level.

        rows:  a0 a1 a2 a3 b0 b1 b2 b3      kept 1 3
        after: a1 a3 b1 b3 .  .  .  .       a row only ever moves forward, so none is overwritten before it moved
    """
    levels, tokens, width = embeds.shape
    rows = embeds.view(levels * tokens, width)
    sources = (torch.arange(levels, device=kept.device)[:, None] * tokens + kept.long()).view(-1)
    for start in range(0, sources.numel(), _ROWS_AT_ONCE):
        block = sources[start : start + _ROWS_AT_ONCE]
        rows[start : start + block.numel()] = rows[block]
    return rows[: sources.numel()]
