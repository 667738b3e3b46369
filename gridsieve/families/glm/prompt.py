"""GLM-4.1V's, 4.5V's and 4.6V's prompts: each slice of a video is a grid of its own between image markers, before its
timestamp.

A video's placeholder becomes `<|begin_of_image|>(grid)<|end_of_image|>3` for each slice: the whole second in which its
first frame is shown. Tokens of videos are those of images, <|image|>. All frames of a video share one pixel budget, and
an image counts as a whole slice.
4.6V has tenths of a second, and a video's length says how densely it is sampled:

    up to      frames a second
    30 s       6
    5 min      2
    longer     1, at most 640

Published checkpoints of 4.6V have the model types of GLM-4.1V and 4.5V: the processors that they name tell them apart.
Source: `Glm4vProcessor`, `Glm4vImageProcessor`, `Glm4vVideoProcessor`, `Glm46VProcessor` and `Glm46VVideoProcessor` of
transformers 5.24; arXiv 2507.01006.
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
from gridsieve.families.parts.sampling import from_first_to_last
from gridsieve.services.preprocessing.layouts.qwen_vl import QwenVL, VideoDefaults, at_least_a_token, at_most, by_slice
from gridsieve.services.preprocessing.prompt.layout import Expansion
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
# Of 4.6V.
_BY_LENGTH = 0.0
_MAX_FRAMES_OF_4_6, _MAX_LENGTH_OF_4_6_S = 640, 2400.0
_SLICES_PER_S = ((30.0, 3.0), (300.0, 1.0), (math.inf, 0.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4V(QwenVL):
    """max_length_s: a longer video has as many frames as one of this length."""

    max_length_s: float

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
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
        return from_first_to_last(total_frames, min(frames, total_frames))

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
        """For each slice its grid between image markers, and its time."""
        return by_slice(grid, base, lambda s: ("<|begin_of_image|>", f"<|end_of_image|>{self.time_text(s)}"))

    def time_text(self, seconds: float) -> str:
        """The text after a slice whose first frame is shown then."""
        return str(int(seconds))


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm46V(Glm4V):
    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        return cls.read_own(checkpoint, _BY_LENGTH, math.inf)

    def own_indices(self, total_frames: int, rate: float, bounds: FrameBounds) -> Sequence[int]:
        """Those of transformers, whatever their number; of a request that says how many a second, as GLM-4.5V's."""
        if bounds.fps != _BY_LENGTH:
            return Glm4V.own_indices(self, total_frames, rate, bounds)
        length_s = total_frames / rate
        seconds = min(length_s, _MAX_LENGTH_OF_4_6_S)
        per_s = bounds.temporal_patch * next(slices for length, slices in _SLICES_PER_S if seconds <= length)
        wanted = min(int(seconds * per_s), _MAX_FRAMES_OF_4_6)
        if not wanted:  # transformers takes none
            return [0]
        found = [0, total_frames - 1]
        if total_frames >= wanted:
            found = _every(1 / per_s, int(length_s), total_frames, 1 / rate)
        if total_frames < wanted or len(found) < wanted:
            found = np.linspace(found[0], found[-1], wanted, dtype=int).tolist()
        elif len(found) > wanted:
            found = np.linspace(0, total_frames - 1, wanted, dtype=int).tolist()
        return list(dict.fromkeys(found))

    def time_text(self, seconds: float) -> str:
        return f"{seconds:.1f} seconds"


def load(checkpoint: Checkpoint) -> Glm4V:
    """The settings of a checkpoint of either kind. Raises StartupError as `from_checkpoint`."""
    named = (
        checkpoint.processor("image"),
        checkpoint.processor("video"),
        checkpoint.read_json("processor_config.json"),
    )
    names = [str(each.get(key)) for each in named for key in ("processor_class", "video_processor_type")]
    known = [name for name in names if name.startswith("Glm")]
    is_new = any(name.startswith("Glm46V") for name in known) if known else checkpoint.model_type == "glm46v"
    return (Glm46V if is_new else Glm4V).from_checkpoint(checkpoint)


def _every(step_s: float, length_s: int, total_frames: int, frame_s: float) -> list[int]:
    """The first frame at or after each multiple of `step_s`, at most one for each, until `length_s`.

    Multiples are sums, which round as those of transformers, whose loop looks at each frame.
    """
    found: list[int] = []
    frame, wanted_s = 0, 0.0
    while True:
        frame = max(frame, math.floor(wanted_s / frame_s) - 1)
        while frame < total_frames and frame * frame_s < wanted_s:
            frame += 1
        if frame >= total_frames:
            return found
        found.append(frame)
        wanted_s += step_s
        if wanted_s >= length_s:
            return found
        frame += 1
