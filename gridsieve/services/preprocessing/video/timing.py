"""The time base of a video's temporal slices: the time of each slice, and the exact mean step between slices.

A family uses one of the two. A slice's time is the middle between its first and its last frame; GLM's is its first
frame's. It knows neither pixels nor families.
Source: the time base of Qwen2.5-VL, arXiv 2502.13923; `Qwen3VLProcessor._calculate_timestamps` of transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH_S = 7 * 24 * 3600

# With this bound on the denominator, a step of at most MAX_LENGTH_S fits into two 64-bit integers on the wire.
_MAX_DENOMINATOR = 2**40


@dataclass(frozen=True, slots=True)
class TimeBase:
    """seconds_per_grid: from one slice to the next, above 0. slices_s: time of each slice from the video's start.

    frames_s: of each frame that was sampled; empty where only slices are known. source_fps: frames a second of the
        video itself, if every frame keeps to it; None where the rate varies or is not known. starts_s: exact times of
        the first frames of slices, where positions follow them; else empty. length_s: of the whole video; None where it
        is not known.
    """

    seconds_per_grid: Fraction
    slices_s: tuple[float, ...]
    frames_s: tuple[float, ...] = ()
    source_fps: Fraction | None = None
    starts_s: tuple[Fraction, ...] = ()
    length_s: Fraction | None = None

    @classmethod
    def of_frames(
        cls, seconds_per_grid: Fraction, frames_s: Sequence[float], slice_frames: int, *, of_first: bool = False
    ) -> TimeBase:
        """The time of a slice, the last of which may be short, is the mean of those of its first and last frames.

        of_first: it is that of its first frame.
        """
        slices = (frames_s[first : first + slice_frames] for first in range(0, len(frames_s), slice_frames))
        return cls(seconds_per_grid, tuple(each[0] if of_first else (each[0] + each[-1]) / 2 for each in slices))

    @classmethod
    def of_step(cls, seconds_per_grid: Fraction, slices: int, slice_frames: int, *, of_first: bool = False) -> TimeBase:
        """Assumes evenly spaced frames from the video's start, `slice_frames` in each `seconds_per_grid`."""
        frames_s = [float(frame * seconds_per_grid / slice_frames) for frame in range(slices * slice_frames)]
        return cls.of_frames(seconds_per_grid, frames_s, slice_frames, of_first=of_first)

    @classmethod
    def of_slices(cls, slices_s: Sequence[float]) -> TimeBase:
        """The step is the mean difference of the times, read as their shortest decimals; 1 s for a single slice.

        Exact, unless its denominator is too large for the wire: then accurate to 1e-12 s.
        """
        times = tuple(time + 0.0 for time in slices_s)  # turns -0.0, which would be printed, into 0.0
        if len(slices_s) == 1:
            return cls(Fraction(1), times)
        mean = (Fraction(str(slices_s[-1])) - Fraction(str(slices_s[0]))) / (len(slices_s) - 1)
        step = max(mean.limit_denominator(_MAX_DENOMINATOR), Fraction(1, _MAX_DENOMINATOR))
        return cls(step, times)
