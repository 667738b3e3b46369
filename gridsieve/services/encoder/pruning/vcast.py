"""V-CAST: slices where the video's course bends keep more tokens, and each slice keeps its most distinctive ones.

    tokens ─▶ mean of a slice, unit length: f ─▶ steps f[t+1] − f[t] ─▶ curvature ─▶ softmax ─▶ budget of the slice
                 └─▶ 1 − cosine to f, + length of the token within its slice's range ─▶ the highest are kept

A token with a value that is not finite, or so large that its length overflows float32, is computed as zeros and dropped
first.
Source: arXiv 2603.27650, without merging. The exact total, what full slices leave to others, steps that are rounding
noise, and the order of ties are Gridsieve's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import ItemPruning, num_kept
from gridsieve.services.encoder.pruning.ranking import finite_spans, finite_tokens, keep_best_of_slices, slice_budgets

_TEMPERATURE = 0.7
# A step between the unit means of two slices that is shorter is rounding noise, and has no direction.
_SHORTEST_STEP = 2.0**-10
# Tokens of no length have a cosine of 0 to everything.
_LEAST_LENGTH = 1e-8


def vcast_scores(embeds: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """How distinctive each token is in its slice, and the curvature at each slice.

    embeds: (t·h·w, D), any float dtype; scored in float32. Returns float32 (t, h·w), −inf for tokens not finite, and
    float32 (t,), from 0 (straight on) to 2 (back), 1 at both ends and beside a step of no length.
    """
    slices = embeds.view(grid.t, grid.slice_tokens, -1)
    scores = torch.empty(slices.shape[:2], device=slices.device)
    means = torch.empty(grid.t, slices.shape[2], dtype=torch.float64, device=slices.device)
    finite = finite_tokens(slices)
    for span, values in finite_spans(slices, finite):
        means[span] = F.normalize(values.sum(1).double(), dim=-1)
        lengths = values.norm(dim=-1)
        along = (values @ means[span, :, None].float())[..., 0]
        distinct = 1 - along / lengths.clamp(min=_LEAST_LENGTH) + _within_range(lengths, finite[span])
        scores[span] = torch.where(finite[span], distinct, -torch.inf)
    return scores, _curvature(means)


def vcast_kept(scores: Sequence[Tensor], grid: Grid, pruning: ItemPruning) -> Tensor:
    """Indices of the tokens that V-CAST keeps.

    scores: from `vcast_scores`.
    Returns int32 (K,), strictly increasing, K = num_kept(grid, pruning), at least one token per slice.
    """
    distinct, curvature = scores
    count = num_kept(grid, pruning)
    shares = torch.softmax(curvature.double() / _TEMPERATURE, dim=0)
    quotas = 1 + _poured(shares, count - grid.t, grid.slice_tokens - 1)
    return keep_best_of_slices(distinct, slice_budgets(quotas, grid.slice_tokens, count), count)


def _within_range(lengths: Tensor, finite: Tensor) -> Tensor:
    """Lengths of tokens (n, h·w), from 0 at the shortest of each slice to 1 at its longest; 0 where all are equal."""
    low = lengths.masked_fill(~finite, torch.inf).amin(1, keepdim=True)
    high = lengths.masked_fill(~finite, -torch.inf).amax(1, keepdim=True)
    return torch.where(high > low, (lengths - low) / (high - low), 0)


def _curvature(means: Tensor) -> Tensor:
    """1 − cosine between the steps to and from each slice: (t, D) to float32 (t,)."""
    steps = means.diff(dim=0)
    straight = F.cosine_similarity(steps[:-1], steps[1:], dim=-1)
    moved = steps.norm(dim=-1) >= _SHORTEST_STEP
    curvature = torch.ones(len(means), device=means.device)
    curvature[1:-1] = torch.where(moved[:-1] & moved[1:], 1 - straight, 1).float()
    return curvature


def _poured(shares: Tensor, amount: int, limit: int) -> Tensor:
    """`amount` in proportion to `shares`, at most `limit` each; the others share the rest likewise.

    shares: float64 (t,), of sum 1. Returns float64 (t,).
    """
    largest = shares.sort(descending=True).values
    full = torch.arange(len(shares), device=shares.device)
    # With the `full` largest full, the others have what is left of the amount, per share.
    per_share = (amount - full * limit) / largest.flip(0).cumsum(0).flip(0)
    enough = per_share * largest <= limit
    # The first that holds; one does, unless all are full.
    first = enough.to(torch.int8).argmax()
    level = torch.where(enough.any(), per_share.gather(0, first.view(1)), torch.inf)
    return (level * shares).clamp(max=limit)
