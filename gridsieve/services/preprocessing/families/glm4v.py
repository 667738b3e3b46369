"""GLM-4.1V and GLM-4.5V: each slice of a video is a grid of its own between image markers, before its timestamp.

A video's placeholder becomes `<|begin_of_image|>(grid)<|end_of_image|>3` for each slice: the whole second in which its
first frame is shown. Tokens of videos are those of images, <|image|>. All frames of a video share one pixel budget, and
an image counts as a whole slice.
Source: `Glm4vProcessor`, `Glm4vImageProcessor` and `Glm4vVideoProcessor` of transformers 5.24; arXiv 2507.01006.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Self

import numpy as np

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid, Modality, SizePx
from gridsieve.services.preprocessing.layouts.qwen_vl import QwenVL, VideoDefaults, at_least_a_token, at_most
from gridsieve.services.preprocessing.prompt.layout import Expansion
from gridsieve.services.preprocessing.prompt.positions import GridSpan
from gridsieve.services.preprocessing.video.resize import PixelBudget, smart_resize
from gridsieve.services.preprocessing.video.sampling import MAX_FRAMES, FrameBounds, FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

_IMAGE, _VIDEO = "<|image|>", "<|video|>"
_DEFAULTS = VideoDefaults(
    patch_px=14,
    size={"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 2 * 30000},
    max_tokens=0,
    old_names=(),
    image_size={"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000},
    only={},
)
_FPS, _MAX_LENGTH_S = 2.0, 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4V(QwenVL):
    """max_length_s: a longer video has as many frames as one of this length."""

    max_length_s: float

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Raises StartupError for settings that are not supported or contradict each other."""
        video = checkpoint.processor("video")
        return cls.read_own(checkpoint, video.number("fps", _FPS), video.number("max_duration", _MAX_LENGTH_S))

    @classmethod
    def read_own(cls, checkpoint: Checkpoint, fps: float, max_length_s: float) -> Self:
        """Reads the settings. fps: frames a second where a request says nothing. Raises as `from_checkpoint`."""
        temporal = checkpoint.config.part("vision_config").whole("temporal_patch_size", 2)
        return cls.read(
            checkpoint,
            _DEFAULTS,
            placeholders={Modality.IMAGE: _IMAGE, Modality.VIDEO: _VIDEO},
            pad=_IMAGE,
            frame_bounds=FrameBounds(fps=fps, min_frames=1, max_frames=MAX_FRAMES, temporal_patch=temporal),
            timed_by_first=True,
            max_length_s=max_length_s,
        )

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """The indices of transformers, each once; evenly spaced ones where a bound of a request says how many."""
        own = () if bounds.num_frames else self.own_indices(total_frames, float(average_rate), bounds)
        frames = bounds.num_frames or min(max(len(own), bounds.min_frames), bounds.max_frames)
        if frames == len(own):
            return tuple(own)
        return tuple(np.linspace(0, total_frames - 1, min(frames, total_frames)).round().astype(int).tolist())

    def own_indices(self, total_frames: int, rate: float, bounds: FrameBounds) -> Sequence[int]:
        """Those of transformers, whatever their number. rate: frames a second of the video."""
        length_s, last = total_frames / rate, total_frames - 1
        if length_s <= self.max_length_s:
            steps = range(max(math.floor(length_s * bounds.fps), 1))
            return list(dict.fromkeys(min(last, math.ceil(step * rate / bounds.fps)) for step in steps))
        frames = int(self.max_length_s * bounds.fps)
        if frames >= total_frames:
            return range(total_frames)
        times_s = np.linspace(0, length_s, frames).tolist()
        return list(dict.fromkeys(min(last, math.ceil(time_s * rate)) for time_s in times_s))

    def image_size(self, height_px: int, width_px: int, wish: FrameSampling) -> SizePx:
        """Height and width of an image after resizing. Raises MediaRejected."""
        return self._size(height_px, width_px, self.frame_bounds.temporal_patch, self.image_budget, wish)

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        """Height and width of each of a video's `frames`, in whole slices, after resizing. Raises MediaRejected."""
        return self._size(height_px, width_px, frames, self.video_budget, wish)

    def _size(self, height_px: int, width_px: int, frames: int, budget: PixelBudget, wish: FrameSampling) -> SizePx:
        patch = self.frame_bounds.temporal_patch
        frames = -(-frames // patch) * patch
        if wish.max_pixels is not None:
            budget = at_most(budget, min(budget.max_px, wish.max_pixels * frames))
        return smart_resize(*at_least_a_token(height_px, width_px, self.token_px), budget, frames, frames)

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """For each slice its grid between image markers, and its time. For an image one grid alone."""
        one = GridSpan(Grid(1, grid.h, grid.w), Fraction(0))
        if base is None:
            return (one,)
        return tuple(
            part
            for seconds in base.slices_s
            for part in ("<|begin_of_image|>", one, f"<|end_of_image|>{self.time_text(seconds)}")
        )

    def time_text(self, seconds: float) -> str:
        """The text after a slice whose first frame is shown then."""
        return str(int(seconds))
