"""Which tokens of a video are kept, by the method that the request names.

It works on merged embeddings and knows neither towers nor requests. How many are kept is `common.retention`'s; a
method that needs more than a few lines has a file of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from common.plan import Grid
from common.retention import EVS, RANDOM, VIDCOM2, Pruning, retained_count
from services.encoder.evs import evs_scores
from services.encoder.vidcom2 import vidcom2_kept

Kept: TypeAlias = Callable[[Tensor, Grid, Pruning], Tensor]

_ROWS_AT_ONCE = 4096


def random_scores(grid: Grid, seed: int) -> Tensor:
    """A random order of the tokens, the same for the same grid and seed: float32 (t·h·w,)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(grid.tokens, generator=generator).float()


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, ties to the earlier: int32 (count,), strictly increasing."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[:count].sort().values.to(torch.int32)


def evs_kept(embeds: Tensor, grid: Grid, pruning: Pruning) -> Tensor:
    return keep_best(evs_scores(embeds, grid), retained_count(grid, pruning))


def random_kept(embeds: Tensor, grid: Grid, pruning: Pruning) -> Tensor:
    return keep_best(random_scores(grid, pruning.seed or 0).to(embeds.device), retained_count(grid, pruning))


# `none` is not among them: there is nothing to choose from where everything is kept.
_KEPT: Mapping[str, Kept] = {EVS: evs_kept, VIDCOM2: vidcom2_kept, RANDOM: random_kept}


def keep_tokens(embeds: Tensor, grid: Grid, pruning: Pruning) -> Tensor:
    """Indices of the tokens of one video that `pruning` keeps.

    embeds: (t·h·w, D), any float dtype.
    Returns int32 (K,), strictly increasing, K = retained_count(grid, pruning).
    """
    if retained_count(grid, pruning) == grid.tokens:
        return torch.arange(grid.tokens, dtype=torch.int32, device=embeds.device)
    return _KEPT[pruning.method](embeds, grid, pruning)


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
