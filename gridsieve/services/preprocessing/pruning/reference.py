"""What was last shown of each token's place, and which places of a slice must be shown again.

    slice        1     2     3     4     5         a place that became 8 levels brighter after slice 0
    change       8     8     8     0     0         to what was last shown of it
    lasting     4.8   9.6  14.4    0     0         what exceeds an allowance of 3.2, added up
    shown        ·     ·     ✓     ·     ·         at 12.8; its reference is new then, and nothing lasts

A slice is compared with what was last shown of each place, not with the slice before it, so slow change is seen; and a
small change is seen if it lasts. The allowance is for the noise of cameras and codecs, which therefore never adds up.
A reference travels with the requests about a video, so it can be written as bytes. It knows neither frames nor gRPC.
Source: a sum of what exceeds an allowance is CUSUM, Page, Continuous Inspection Schemes, Biometrika 41, 1954.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

import numpy as np

from gridsieve.common.contract.plan import Grid, Int32Array
from gridsieve.services.preprocessing.pruning.change import BLOCKS_A_SIDE, STEPS, change_steps
from gridsieve.services.preprocessing.pruning.pixel_change import MAX_LEVEL

# Of the threshold: the allowance, and the sum at which a place is shown. A change of their sum, 5/8, is shown at once.
ALLOWANCE, LIMIT = Fraction(1, 8), Fraction(1, 2)


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """means: of each place when it was last shown, as `change.block_means` returns them. lasting: int32 [h·w], the sum
    since then, in `change.STEPS` a level; it is below LIMIT · 255 levels.
    """

    means: Int32Array
    lasting: Int32Array

    @classmethod
    def of(cls, means: Int32Array) -> Self:
        """After a slice that was shown whole. means: of it."""
        return cls(means, np.zeros(means[0].size // BLOCKS_A_SIDE**2, np.int32))

    @classmethod
    def read(cls, written: bytes, grid: Grid) -> Self:
        """From what `written` returns, of `retention.reference_bytes`."""
        numbers = np.frombuffer(written, "<u2").astype(np.int32)
        lasting, means = np.split(numbers, [grid.slice_tokens])
        return cls(means.reshape(3, BLOCKS_A_SIDE * grid.h, BLOCKS_A_SIDE * grid.w), lasting)

    def written(self) -> bytes:
        return np.concatenate([self.lasting, self.means.ravel()]).astype("<u2").tobytes()

    def next(self, means: Int32Array, threshold: float) -> tuple[Int32Array, Reference]:
        """The tokens of the next slice that must be shown, int32 [k], increasing; and the reference after it.

        means: of the slice. threshold: a share of 255 levels.
        """
        steps = Fraction(str(threshold)) * MAX_LEVEL * STEPS
        allowance, limit = math.floor(steps * ALLOWANCE), math.ceil(steps * LIMIT)
        lasting = np.maximum(self.lasting + change_steps(means, self.means) - allowance, 0)
        shown = lasting >= limit
        places = shown.reshape(means.shape[1] // BLOCKS_A_SIDE, -1)
        blocks = places.repeat(BLOCKS_A_SIDE, 0).repeat(BLOCKS_A_SIDE, 1)
        after = Reference(np.where(blocks, means, self.means), np.where(shown, 0, lasting))
        return np.flatnonzero(shown).astype(np.int32), after
