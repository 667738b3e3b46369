"""Which tokens of a video are kept, by the method that the request names.

It works on merged embeddings and knows neither towers nor requests. How many are kept is `common.contract`'s; a
method that needs more than a few lines has a file of its own. What a method finds out about tokens whatever the rate,
its scores, can be remembered for the next who asks. All sizes follow from grid and rate, so that nothing here waits for
a device to say one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from common.contract.plan import Grid
from common.contract.retention import EVS, RANDOM, VIDCOM2, Pruning, retained_count
from services.encoder.pruning.evs import evs_scores
from services.encoder.pruning.vidcom2 import vidcom2_kept, vidcom2_scores
from services.encoder.tower.forward import send

Scores: TypeAlias = tuple[Tensor, ...]

# Of one token, by all methods: one float32 for EVS, two for VidCom2.
SCORES_BYTES = 12


@dataclass(frozen=True, slots=True)
class Method:
    """score: (t·h·w, D), any float dtype, to float32 values by token; keep: of those, int32 (K,), increasing."""

    score: Callable[[Tensor, Grid], Scores]
    keep: Callable[[Scores, Grid, Pruning], Tensor]


def random_scores(grid: Grid, seed: int) -> Tensor:
    """A random order of the tokens, the same for the same grid and seed: float32 (t·h·w,)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(grid.tokens, generator=generator).float()


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, ties to the earlier: int32 (count,), strictly increasing."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[:count].sort().values.to(torch.int32)


def _evs_scores(embeds: Tensor, grid: Grid) -> Scores:
    return (evs_scores(embeds, grid),)


def _evs_kept(scores: Scores, grid: Grid, pruning: Pruning) -> Tensor:
    return keep_best(scores[0], retained_count(grid, pruning))


def _no_scores(embeds: Tensor, grid: Grid) -> Scores:
    return ()


def _random_kept(_: Scores, grid: Grid, pruning: Pruning) -> Tensor:
    return keep_best(random_scores(grid, pruning.seed or 0), retained_count(grid, pruning))


# `none` is not among them: there is nothing to choose from where everything is kept.
_METHODS: Mapping[str, Method] = {
    EVS: Method(_evs_scores, _evs_kept),
    VIDCOM2: Method(vidcom2_scores, vidcom2_kept),
    RANDOM: Method(_no_scores, _random_kept),
}


def keep_tokens(embeds: Tensor, grid: Grid, pruning: Pruning, known: dict[str, Scores] | None = None) -> Tensor:
    """Indices of the tokens of one video that `pruning` keeps.

    embeds: (t·h·w, D), any float dtype. known: scores of these embeddings, by method; new ones are put in.
    Returns int32 (K,), strictly increasing, K = retained_count(grid, pruning).
    """
    if retained_count(grid, pruning) == grid.tokens:
        return torch.arange(grid.tokens, dtype=torch.int32, device=embeds.device)
    method = _METHODS[pruning.method]
    known = {} if known is None else known
    if pruning.method not in known:
        known[pruning.method] = method.score(embeds, grid)
    return send(method.keep(known[pruning.method], grid, pruning), embeds.device)
