"""Efficient Video Sampling: keeps the tokens that differ most from the token at the same place one slice earlier.

`evs` compares the tokens of the whole video; `evs_causal` those of a slice, whose choice no later slice changes.
Source: arXiv 2510.14624, embedding variant; the causal choice, the rounding and the rank of NaN are Gridsieve's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import ItemPruning, causal_slice_tokens, num_kept
from gridsieve.services.encoder.pruning.ranking import keep_best, keep_best_of_slices, rounded, spans


def evs_scores(embeds: Tensor, grid: Grid) -> tuple[Tensor]:
    """1 − cosine similarity of each token to the one at the same place one slice earlier.

    embeds: (t·h·w, D), any float dtype; scored in float32.
    Returns float32 (t·h·w,), multiples of 2⁻¹⁶; slice 0 is +inf, NaN is −inf.
    """
    slices = embeds.view(grid.t, grid.slice_tokens, -1)
    scores = torch.full((grid.t, grid.slice_tokens), torch.inf, device=embeds.device)
    for span in spans(slices, first=1):
        pairs = slices[span.start - 1 : span.stop].float()
        change = rounded(1 - F.cosine_similarity(pairs[1:], pairs[:-1], dim=-1))
        scores[span] = torch.where(change.isnan(), -torch.inf, change)
    return (scores.view(-1),)


def evs_kept(scores: Sequence[Tensor], grid: Grid, pruning: ItemPruning) -> Tensor:
    """Indices of the best tokens of the whole video: int32 (K,), strictly increasing."""
    return keep_best(scores[0], num_kept(grid, pruning))


def evs_causal_kept(scores: Sequence[Tensor], grid: Grid, pruning: ItemPruning) -> Tensor:
    """Indices of all tokens of the first slice and of the best of each other: int32 (K,), strictly increasing."""
    return _best_of_slices(scores[0].view(grid.t, -1), grid, pruning, 0)


def evs_causal_part(embeds: Tensor, grid: Grid, pruning: ItemPruning, start: int) -> Tensor:
    """What `evs_causal_kept` keeps of some slices of a video, from `start` on: int32 (k,), indices into its grid.

    embeds: of these slices and, unless `start` is 0, of the slice before them, (n·h·w, D).
    """
    (scores,) = evs_scores(embeds, Grid(len(embeds) // grid.slice_tokens, grid.h, grid.w))
    return _best_of_slices(scores.view(-1, grid.slice_tokens)[min(1, start) :], grid, pruning, start)


def _best_of_slices(scores: Tensor, grid: Grid, pruning: ItemPruning, start: int) -> Tensor:
    """scores: float32 (n, h·w), of the slices from `start` on."""
    each = causal_slice_tokens(grid, pruning.rate)
    budgets, count = torch.full((len(scores),), each, device=scores.device), each * len(scores)
    if not start:
        budgets[:1].fill_(grid.slice_tokens)  # an assignment would wait for the device
        count += grid.slice_tokens - each
    return keep_best_of_slices(scores, budgets, count) + start * grid.slice_tokens
