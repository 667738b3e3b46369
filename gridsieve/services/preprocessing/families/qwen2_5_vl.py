"""Qwen2.5-VL: as Qwen2-VL, but the time between slices determines their distance in positions.

Source: `Qwen2_5_VLProcessor` of transformers 5.24; the time base of Qwen2.5-VL, arXiv 2502.13923.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid
from gridsieve.services.preprocessing.families.qwen2_vl import DEFAULTS, Qwen2VL
from gridsieve.services.preprocessing.prompt.layout import Expansion
from gridsieve.services.preprocessing.prompt.positions import GridSpan
from gridsieve.services.preprocessing.video.timing import TimeBase

_TOKENS_PER_SECOND = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25VL(Qwen2VL):
    """tokens_per_second: positions for each second of video."""

    tokens_per_second: Fraction

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Raises StartupError for settings that are not supported or contradict each other."""
        per_second = checkpoint.config.part("vision_config").number("tokens_per_second", _TOKENS_PER_SECOND)
        return cls.read(checkpoint, DEFAULTS, tokens_per_second=Fraction(str(per_second)))

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """One grid. Its time step is tokens_per_second · seconds_per_grid, 0 for an image; by time, each slice is at
        ⌊tokens_per_second · its first frame's time⌋, from the first one."""
        if base and base.starts_s:
            places = [math.floor(self.tokens_per_second * start_s) for start_s in base.starts_s]
            return (GridSpan(grid, Fraction(0), tuple(place - places[0] for place in places)),)
        return (GridSpan(grid, self.tokens_per_second * base.seconds_per_grid if base else Fraction(0)),)
