"""Ranking tokens by score, for every pruning method: bounded memory, scores without rounding noise, stable ties."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# In a still picture, differences between slices are rounding noise. Scores are rounded to multiples of this, so that
# two implementations of a formula keep the same tokens.
SCORE_STEP = 2.0**-16

# Values read at once, which bounds the float32 copies of a long video.
_READ_AT_ONCE = 2**22


def rounded(scores: Tensor) -> Tensor:
    """Each score's nearest multiple of 2⁻¹⁶."""
    return torch.round(scores / SCORE_STEP) * SCORE_STEP


def spans(slices: Tensor, first: int = 0) -> Iterator[slice]:
    """Consecutive spans of slices from `first` on, each small enough to be copied to float32.

    slices: (t, h·w, D).
    """
    step = max(1, _READ_AT_ONCE // slices[0].numel())
    for start in range(first, len(slices), step):
        yield slice(start, min(start + step, len(slices)))


def keep_best(scores: Tensor, count: int) -> Tensor:
    """Indices of the `count` highest scores, ties to the earlier token: int32 (count,), strictly increasing."""
    order = torch.argsort(scores, descending=True, stable=True)
    return order[:count].sort().values.to(torch.int32)
