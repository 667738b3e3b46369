"""Qwen2-VL: a video is one grid, whose slices are one position apart. The pixel budget applies to each frame.

Source: `Qwen2VLVideoProcessor` of transformers 5.24, index for index; Qwen2-VL, arXiv 2409.12191.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

import numpy as np

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid, SizePx
from gridsieve.services.preprocessing.layouts.qwen_vl import QwenVL, VideoDefaults, at_most
from gridsieve.services.preprocessing.prompt.layout import Expansion
from gridsieve.services.preprocessing.prompt.positions import GridSpan
from gridsieve.services.preprocessing.video.resize import smart_resize
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

DEFAULTS = VideoDefaults(
    patch_px=14,
    size={"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    max_tokens=128_000,
    old_names=("image", "video"),
)
_LANES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VL(QwenVL):
    """The settings of one checkpoint."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Raises StartupError for settings that are not supported or contradict each other."""
        return cls.read(checkpoint, DEFAULTS)

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """The indices of transformers, sometimes an odd number of them.

        Two deviations: a video too short for one temporal patch yields its first frame (transformers divides by zero),
        and an index that rounding puts after the last frame is left out (transformers fails).
        """
        patch = bounds.temporal_patch
        if bounds.num_frames is not None:
            frames = round(bounds.num_frames / patch) * patch
        else:
            max_frames = min(bounds.max_frames, total_frames) // patch * patch
            wanted = total_frames / float(average_rate) * bounds.fps
            frames = math.floor(min(max(wanted, bounds.min_frames), max_frames, total_frames) / patch) * patch
        if frames == 0:
            return (0,)
        step = total_frames / frames
        return tuple(index for index in _torch_arange(total_frames, step) if index < total_frames)

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        """Height and width of each of a video's `frames` after resizing. Raises MediaRejected."""
        budget = self.video_budget if wish.max_pixels is None else at_most(self.video_budget, wish.max_pixels)
        if self.max_video_tokens is not None:
            total = int(self.max_video_tokens * budget.factor_px**2 * 0.9)
            share = total * self.frame_bounds.temporal_patch // frames
            budget = replace(budget, max_px=max(min(budget.max_px, share), int(budget.min_px * 1.05)))
        return smart_resize(height_px, width_px, budget)

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """One grid."""
        return (GridSpan(grid, Fraction(1)),)


def _torch_arange(end: int, step: float) -> list[int]:
    """Reproduces `torch.arange(0, end, step).int()`, rounding for rounding.

    torch computes in pairs of lanes of 8 elements: it rounds the first element of each lane to float32, derives the
    others from it in float64, and rounds them; elements that fill no pair are computed one by one. The result may have
    one element more than end / step, which may be `end` itself.
    """
    count = math.ceil(end / step)
    index = np.arange(count)
    lane = (index // _LANES * _LANES * step).astype(np.float32).astype(np.float64) + index % _LANES * step
    values = np.where(index < count // (2 * _LANES) * 2 * _LANES, lane, index * step).astype(np.float32)
    return [int(value) for value in values]
