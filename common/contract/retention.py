"""Which pruning methods there are, and how many tokens each keeps.

The count is known from the grid alone, before anything is encoded, so that admission and KV sizing can rely on it.
Which tokens are kept is `services.encoder.pruning.methods`'s business.
Source: Efficient Video Sampling, arXiv 2510.14624, and VidCom2, arXiv 2505.14454; the floors and the exact arithmetic
are Framesieve's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from common.contract.errors import InvalidRequest
from common.contract.plan import Grid, Modality

EVS = "evs"
VIDCOM2 = "vidcom2"
RANDOM = "random"
NONE = "none"
METHODS = (EVS, VIDCOM2, RANDOM, NONE)


@dataclass(frozen=True, slots=True)
class Pruning:
    """How one media item is pruned.

    rate: the share of a video's tokens to drop, 0 ≤ rate < 1, read as its shortest decimal.
    method: one of METHODS.
    seed: for `random`; 0 if None.
    Raises InvalidRequest for a rate outside its range or an unknown method.
    """

    rate: float = 0.0
    method: str = EVS
    seed: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate) and 0 <= self.rate < 1):
            raise InvalidRequest(f"pruning.rate must be at least 0 and below 1, got {self.rate}")
        if self.method not in METHODS:
            raise InvalidRequest(f"pruning.method {self.method!r} does not exist, the methods are {', '.join(METHODS)}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise InvalidRequest(f"pruning.seed must be at least 0 and below 2^63, got {self.seed}")


def method_of(pruning: Pruning, modality: Modality) -> str:
    """The method that an item counts as: `none` where nothing is ever dropped, of an image and at rate 0."""
    return pruning.method if modality is Modality.VIDEO and pruning.rate else NONE


def retained_count(grid: Grid, pruning: Pruning, modality: Modality = Modality.VIDEO) -> int:
    """How many of the grid's tokens are kept: ⌊t·h·w·(1 − rate)⌋, but at least a floor; and all of an image's.

    The floor is the whole slice 0, h·w tokens; for `vidcom2` one token of each slice, t tokens.
    """
    if modality is Modality.IMAGE or pruning.method == NONE:
        return grid.tokens
    floor = grid.t if pruning.method == VIDCOM2 else grid.slice_tokens
    return max(floor, math.floor(grid.tokens * (1 - Fraction(str(pruning.rate)))))
