"""When a video's temporal slices are shown: each by itself in seconds, and as one exact step from each to the next.

Families use the one or the other. It knows neither frames' pixels nor families.
Source: the time base of Qwen2.5-VL, arXiv 2502.13923; `Qwen3VLProcessor._calculate_timestamps` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH_S = 7 * 24 * 3600

# With at most so many seconds before it, a step whose denominator is below this travels as two 64-bit integers.
_MAX_DENOMINATOR = 2**40


@dataclass(frozen=True, slots=True)
class TimeBase:
    """seconds_per_grid: from each slice to the next, above 0. slices_s: when each is shown, from the video's start."""

    seconds_per_grid: Fraction
    slices_s: tuple[float, ...]

    @classmethod
    def of_frames(cls, seconds_per_grid: Fraction, frames_s: Sequence[float], slice_frames: int) -> TimeBase:
        """A slice is shown at the average of its first and its last frame's times."""
        firsts, lasts = frames_s[::slice_frames], frames_s[slice_frames - 1 :: slice_frames]
        slices_s = tuple((first + last) / 2 for first, last in zip(firsts, lasts, strict=True))
        return cls(seconds_per_grid, slices_s)

    @classmethod
    def of_step(cls, seconds_per_grid: Fraction, slices: int, slice_frames: int) -> TimeBase:
        """As if frames stood evenly from the video's start on, `slice_frames` in each `seconds_per_grid`."""
        frames_s = [float(frame * seconds_per_grid / slice_frames) for frame in range(slices * slice_frames)]
        return cls.of_frames(seconds_per_grid, frames_s, slice_frames)

    @classmethod
    def of_slices(cls, slices_s: Sequence[float]) -> TimeBase:
        """The step is the mean of those between the times, read as their shortest decimals; 1 s for one slice.

        Exact, unless it is so fine that it would not travel: then to within 1e-12 s.
        """
        times = tuple(time + 0.0 for time in slices_s)  # -0.0 would be shown
        if len(slices_s) == 1:
            return cls(Fraction(1), times)
        mean = (Fraction(str(slices_s[-1])) - Fraction(str(slices_s[0]))) / (len(slices_s) - 1)
        step = max(mean.limit_denominator(_MAX_DENOMINATOR), Fraction(1, _MAX_DENOMINATOR))
        return cls(step, times)
