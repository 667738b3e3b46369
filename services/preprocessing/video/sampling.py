"""Selects the frames of a video: those at the indices that its family picks, by time where the rate varies.

It works on presentation times only and knows neither containers nor codecs nor families.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

from common.contract.errors import InvalidRequest

MAX_FPS = 1000.0
MAX_FRAMES = 768


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """A request's settings for the frames of one media item; None selects the checkpoint's default.

    fps: frames a second. min_frames, max_frames: bounds on their number. max_pixels: of one frame after resizing.
    start_s, end_s: seconds from the video's start.
    allow_truncated: take a video of which more than a tenth of the frames is missing.
    Raises InvalidRequest for a value outside its range.
    """

    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    start_s: float | None = None
    end_s: float | None = None
    allow_truncated: bool = False

    def __post_init__(self) -> None:
        if self.fps is not None and not 0 < self.fps <= MAX_FPS:
            raise InvalidRequest(f"frame_sampling.fps must be above 0 and at most {MAX_FPS:g}, got {self.fps}")
        for name, value in (("min_frames", self.min_frames), ("max_frames", self.max_frames)):
            if value is not None and not 1 <= value <= MAX_FRAMES:
                raise InvalidRequest(f"frame_sampling.{name} must be between 1 and {MAX_FRAMES}, got {value}")
        if self.min_frames is not None and self.max_frames is not None and self.max_frames < self.min_frames:
            raise InvalidRequest(
                f"frame_sampling.max_frames must be at least min_frames {self.min_frames}, got {self.max_frames}"
            )
        for name, time in (("start_s", self.start_s), ("end_s", self.end_s)):
            if time is not None and not (math.isfinite(time) and time >= 0):
                raise InvalidRequest(f"frame_sampling.{name} must be at least 0, got {time}")
        if self.end_s is not None and self.end_s <= (self.start_s or 0):
            raise InvalidRequest(
                f"frame_sampling.end_s must be above frame_sampling.start_s {self.start_s or 0:g}, got {self.end_s:g}"
            )


@dataclass(frozen=True, slots=True)
class FrameBounds:
    """How densely a video is sampled: the checkpoint's defaults, or these merged with a request's settings."""

    fps: float
    min_frames: int
    max_frames: int
    temporal_patch: int

    def merged(self, wish: FrameSampling) -> FrameBounds:
        """The bounds overridden by `wish`. A default bound that conflicts with a requested one is adjusted to it."""
        low = wish.min_frames or min(self.min_frames, wish.max_frames or MAX_FRAMES)
        high = wish.max_frames or max(self.max_frames, low)
        return FrameBounds(wish.fps or self.fps, low, high, self.temporal_patch)


# (frames, their average rate, bounds) -> indices below `frames`, not decreasing, at least one.
PickIndices: TypeAlias = Callable[[int, Fraction, FrameBounds], Sequence[int]]


@dataclass(frozen=True, slots=True)
class FrameRate:
    """Frames a second, and whether every frame follows it to within a tick."""

    per_s: Fraction
    constant: bool


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """Presentation times of the frames of a video, or of a cut of one.

    ticks: increasing, at least one, in units of time_base seconds, relative to the video's first frame.
    tail_ticks: duration of the last frame.
    rates: frames a second as the container declares them, most trusted first.
    """

    ticks: Sequence[int]
    tail_ticks: int
    time_base: Fraction
    rates: tuple[Fraction, ...]

    @property
    def length_s(self) -> Fraction:
        """From the first frame to the end of the last."""
        return (self.ticks[-1] - self.ticks[0] + self.tail_ticks) * self.time_base

    def cut(self, start_s: float | None, end_s: float | None) -> FrameTimes:
        """The frames that appear in [start_s, end_s). Raises InvalidRequest if there are none."""
        first = bisect.bisect_left(self.ticks, _ticks_from(start_s or 0, self.time_base))
        end = len(self.ticks)
        if end_s is not None:
            end = bisect.bisect_left(self.ticks, _ticks_from(end_s, self.time_base))
        if first >= end:
            asked = f"{start_s or 0:g} s and {'the end' if end_s is None else f'{end_s:g} s'}"
            raise InvalidRequest(
                f"frame_sampling.start_s and frame_sampling.end_s select nothing: no frame appears between {asked}, "
                f"the video lasts {float(self.length_s):.3f} s"
            )
        tail = self.tail_ticks if end == len(self.ticks) else self.ticks[end] - self.ticks[end - 1]
        return FrameTimes(self.ticks[first:end], tail, self.time_base, self.rates)

    def rate(self) -> FrameRate:
        """The first declared rate that every frame follows to within a tick; else the average rate.

        The average is the first declared rate if that agrees with the duration, else frames / duration.
        """
        for per_s in self.rates:
            if self._keeps_to(per_s):
                return FrameRate(per_s, constant=True)
        for per_s in self.rates[:1]:
            if abs(len(self.ticks) / per_s - self.length_s) <= self.tail_ticks * self.time_base:
                return FrameRate(per_s, constant=False)
        return FrameRate(len(self.ticks) / self.length_s, constant=False)

    def at(self, indices: Sequence[int], rate: FrameRate) -> tuple[int, ...]:
        """The frames at `indices` of the rate, as places in `ticks`.

        At a constant rate the indices themselves; else the last frame shown at or before index / rate.
        """
        if rate.constant:
            return tuple(indices)
        interval = 1 / (rate.per_s * self.time_base)
        return tuple(
            bisect.bisect_right(self.ticks, self.ticks[0] + math.floor(index * interval)) - 1 for index in indices
        )

    def timestamp_s(self, place: int, rate: FrameRate) -> float:
        """When a frame of the whole video is shown: place / rate at a constant rate, as in transformers."""
        return place / float(rate.per_s) if rate.constant else float(self.ticks[place] * self.time_base)

    def _keeps_to(self, per_s: Fraction) -> bool:
        interval = 1 / (per_s * self.time_base)
        # In integers: Fractions are too slow for hours of video.
        ticks, frames, first = interval.numerator, interval.denominator, self.ticks[0]
        return all(abs((tick - first) * frames - index * ticks) <= frames for index, tick in enumerate(self.ticks))


@dataclass(frozen=True, slots=True)
class Sampled:
    """The selected frames: places in the whole video's ticks, padded to whole temporal patches.

    frames: their number before padding, which determines seconds_per_grid.
    timestamps_s: when each is shown, from the video's start.
    """

    places: tuple[int, ...]
    frames: int
    timestamps_s: tuple[float, ...]
    seconds_per_grid: Fraction


def sample(times: FrameTimes, bounds: FrameBounds, wish: FrameSampling, pick: PickIndices) -> Sampled:
    """Selects frames of the part of a video that `wish` names. Raises InvalidRequest if that part has no frames."""
    part = times.cut(wish.start_s, wish.end_s)
    whole = times.rate()
    rate = whole if whole.constant else part.rate()
    total = len(part.ticks)
    bounds = bounds.merged(wish)
    within = part.at(pick(total, rate.per_s, bounds), rate)
    first = bisect.bisect_left(times.ticks, part.ticks[0])
    places = [first + place for place in within]
    places += places[-1:] * (-len(places) % bounds.temporal_patch)
    return Sampled(
        places=tuple(places),
        frames=len(within),
        timestamps_s=tuple(times.timestamp_s(place, whole) for place in places),
        seconds_per_grid=bounds.temporal_patch * total / (len(within) * rate.per_s),
    )


def _ticks_from(time_s: float, time_base: Fraction) -> int:
    """The first tick at or after a time, the time read as its shortest decimal."""
    return math.ceil(Fraction(str(time_s)) / time_base)
