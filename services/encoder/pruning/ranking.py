"""What methods of pruning share: videos read some slices at a time, and scores without rounding noise."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# In a still picture the differences are rounding noise: scores are multiples of this, so that two
# implementations of the formula keep the same tokens.
SCORE_STEP = 2.0**-16

# So that a long video takes a little memory beside its own.
_READ_AT_ONCE = 2**22  # values


def rounded(scores: Tensor) -> Tensor:
    """Each score's nearest multiple of 2⁻¹⁶."""
    return torch.round(scores / SCORE_STEP) * SCORE_STEP


def spans(slices: Tensor, first: int = 0) -> Iterator[slice]:
    """Consecutive spans of the slices from `first` on, each small enough to be held in float32.

    slices: (t, h·w, D).
    """
    step = max(1, _READ_AT_ONCE // slices[0].numel())
    for start in range(first, len(slices), step):
        yield slice(start, min(start + step, len(slices)))
