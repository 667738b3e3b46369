"""Ranking tokens by score, for every pruning method: bounded memory, scores without rounding noise, stable ties,
and budgets of slices whose sum is exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# In a still picture, differences between slices are rounding noise. Scores are rounded to multiples of this, so that
# two implementations of a formula keep the same tokens.
SCORE_STEP = 2.0**-16

# Values read at once, which bounds the float32 copies of a long video. On a CPU they stay in its cache; on a card each
# kernel takes as long to launch as a few million values to read.
_READ_AT_ONCE, _READ_AT_ONCE_BY_A_CARD = 2**22, 2**25


def rounded(scores: Tensor) -> Tensor:
    """Each score's nearest multiple of 2⁻¹⁶."""
    return torch.round(scores / SCORE_STEP) * SCORE_STEP


def spans(slices: Tensor, first: int = 0) -> Iterator[slice]:
    """Consecutive spans of slices from `first` on, each small enough to be copied to float32.

    slices: (t, h·w, D).
    """
    at_once = _READ_AT_ONCE_BY_A_CARD if slices.is_cuda else _READ_AT_ONCE
    step = max(1, at_once // slices[0].numel())
    for start in range(first, len(slices), step):
        yield slice(start, min(start + step, len(slices)))


def finite_tokens(slices: Tensor) -> Tensor:
    """Which tokens have a length that is finite in float32, and so finite values only: bool (t, h·w).

    slices: (t, h·w, D).
    """
    return torch.cat([slices[span].float().square().sum(-1).isfinite() for span in spans(slices)])


def finite_spans(slices: Tensor, finite: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Spans of a video and their tokens, float32 (n, h·w, D); those that are not `finite` are zeros."""
    for span in spans(slices):
        yield span, slices[span].float().masked_fill(~finite[span, :, None], 0)


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, ties to the earlier token: int32 (count,), strictly increasing."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[:count].sort().values.to(torch.int32)


def keep_best_of_slices(scores: Tensor, budgets: Tensor, count: int) -> Tensor:
    """Indices of the best tokens of each slice, ties to the earlier token: int32 (count,), strictly increasing.

    scores: float32 (t, h·w), here rounded: equal tokens differ by rounding noise. budgets: how many each slice keeps,
    int64 (t,), whose sum is `count`.
    """
    within = torch.arange(scores.shape[1], device=scores.device) < budgets[:, None]
    order = rounded(scores).argsort(dim=1, descending=True, stable=True)
    kept = torch.zeros_like(within).scatter(1, order, within)
    # A stable sort moves the kept tokens to the front, in order. `count` is known here: no synchronisation.
    return kept.view(-1).to(torch.int8).argsort(descending=True, stable=True)[:count].to(torch.int32)


def slice_budgets(quotas: Tensor, slice_tokens: int, count: int) -> Tensor:
    """How many tokens each slice keeps, int64 (t,): quotas rounded by largest remainder, so that the sum is `count`.

    quotas: float64 (t,); quotas and results are clamped to 1 … slice_tokens. count: from t to t · slice_tokens.
    Of equal remainders the earlier slice's counts as the larger.

    Tokens missing after rounding down are added in rounds, one per slice; surplus tokens are removed likewise:

        remainders  .9 .6 .2        5 missing, the first slice can take only 1
        round 1      +  +  +        in the order of remainders, largest first (surplus: smallest first)
        round 2         +  +
    """
    assert len(quotas) <= count <= len(quotas) * slice_tokens
    clipped = quotas.clamp(1, slice_tokens)
    whole = clipped.floor().to(torch.int64)
    missing = count - whole.sum()  # negative: a surplus
    adding = missing > 0
    by_remainder = (whole - clipped).argsort(stable=True)
    turns = torch.where(adding, by_remainder, by_remainder.flip(0))
    possible = torch.where(adding, slice_tokens - whole, whole - 1)[turns]
    rounds = torch.arange(slice_tokens, device=quotas.device)
    moves = rounds[:, None] < possible  # (rounds, t): whether a slice, at its turn, can still give or take a token
    moved = moves & (moves.view(-1).cumsum(0).view(moves.shape) <= missing.abs())
    return whole.scatter_add(0, turns, moved.sum(0) * missing.sign())
