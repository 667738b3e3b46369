"""Which tokens of a video are kept, by the method that the request names.

A method scores merged embeddings, whatever the rate, and then selects by these scores; scores are cached with the
embeddings. How many tokens are kept is in `common/contract/retention.py`. All sizes follow from grid and rate, so
nothing here synchronises with the device. It knows neither towers nor requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import EVS, EVS_CAUSAL, RANDOM, VCAST, VIDCOM2, ItemPruning, num_kept
from gridsieve.services.compute.transfers import to_device
from gridsieve.services.encoder.pruning.evs import evs_causal_kept, evs_causal_part, evs_kept, evs_scores
from gridsieve.services.encoder.pruning.ranking import keep_best
from gridsieve.services.encoder.pruning.vcast import vcast_kept, vcast_scores
from gridsieve.services.encoder.pruning.vidcom2 import vidcom2_kept, vidcom2_scores

Scores: TypeAlias = tuple[Tensor, ...]

# At most, per token, for all methods: a float32 for EVS, two for VidCom2, and for V-CAST one and one a slice.
SCORES_BYTES = 20


@dataclass(frozen=True, slots=True)
class Method:
    """score: (t·h·w, D), any float dtype, to float32 values. keep: from these, int32 (K,), increasing.

    scores: the method under whose name the scores are cached.
    keep_part: what is kept of some slices, where no later slice changes it: from embeddings (n·h·w, D) of these and the
        slice before them, given the first of them. None: the choice needs the whole video.
    """

    scores: str
    score: Callable[[Tensor, Grid], Scores]
    keep: Callable[[Scores, Grid, ItemPruning], Tensor]
    keep_part: Callable[[Tensor, Grid, ItemPruning, int], Tensor] | None = None


def _random_kept(_: Scores, grid: Grid, pruning: ItemPruning) -> Tensor:
    """The same tokens for the same grid, rate and seed."""
    generator = torch.Generator().manual_seed(pruning.seed or 0)
    order = torch.randperm(grid.tokens, generator=generator).float()
    return keep_best(order, num_kept(grid, pruning))


# Without `none`, which keeps everything: `keep_tokens` returns before it looks here.
_METHODS: Mapping[str, Method] = {
    EVS: Method(EVS, evs_scores, evs_kept),
    EVS_CAUSAL: Method(EVS, evs_scores, evs_causal_kept, evs_causal_part),
    VIDCOM2: Method(VIDCOM2, vidcom2_scores, vidcom2_kept),
    VCAST: Method(VCAST, vcast_scores, vcast_kept),
    RANDOM: Method(RANDOM, lambda embeds, grid: (), _random_kept),
}


def keep_tokens(embeds: Tensor, grid: Grid, pruning: ItemPruning, known: dict[str, Scores] | None = None) -> Tensor:
    """Indices of the tokens of one video that `pruning` keeps.

    embeds: (t·h·w, D), any float dtype. known: scores of these embeddings by method, to which new ones are added.
    Returns int32 (K,), strictly increasing, K = num_kept(grid, pruning), on the device of `embeds`.
    """
    if num_kept(grid, pruning) == grid.tokens:
        return torch.arange(grid.tokens, dtype=torch.int32, device=embeds.device)
    method = _METHODS[pruning.method]
    known = {} if known is None else known
    if method.scores not in known:
        known[method.scores] = method.score(embeds, grid)
    return to_device(method.keep(known[method.scores], grid, pruning), embeds.device)


def keeps_by_slice(method: str) -> bool:
    """Whether a method after the tower needs no later slice to choose the tokens of a slice."""
    return method in _METHODS and _METHODS[method].keep_part is not None


def keep_part(embeds: Tensor, grid: Grid, pruning: ItemPruning, start: int) -> Tensor:
    """Indices into the grid of the tokens that `pruning`, which drops some, keeps of slices from `start` on.

    embeds: of these slices and, unless `start` is 0, of the slice before them, (n·h·w, D). Returns int32 (k,), strictly
    increasing, on the device of `embeds`.
    """
    part = _METHODS[pruning.method].keep_part
    assert part is not None
    return part(embeds, grid, pruning, start)
