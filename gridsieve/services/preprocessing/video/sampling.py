"""Selects the frames of a video: those at the indices that its family picks, by time where the rate varies.

Where it varies, the family says how many frames are sent and how they are spread: over the time that the video lasts,
in which a frame counts at most one step, so that none is sent twice while another one is left out.

    shown       |0                          |1 |2 |3 |4 |5 |6       |
    counted     |0   |1 |2 |3 |4 |5 |6   |                               five steps
    sent         ^    ^    ^    ^    ^                                   0, 1, 2, 4, 6

Modes choose by places that their caller finds: "keyframes" among these alone, as among the frames of a video that has
no others; "shots" takes these, and fills each shot evenly in time.

    shots    |. . . . . .|. .|. . . . . . . .|
    sent      0     3     6   8   10    13        six: the next goes where frames are furthest apart

It works on presentation times only and knows neither containers nor codecs nor families.
"""

from __future__ import annotations

import bisect
import heapq
import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Self, TypeAlias

import numpy as np

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import SAMPLING_MODES, SHOTS, UNIFORM

MAX_FPS = 1000.0
MAX_FRAMES = 768

# Times that are given in seconds are read to the microsecond.
TICKS_PER_S = 1_000_000
_NTSC = Fraction(1000, 1001)
# What frame_indices (with num_frames and mode), and num_frames, must not be set together with.
_OTHER_TIMES = ("fps", "min_frames", "max_frames", "start_s", "end_s")
_OTHER_COUNTS = _OTHER_TIMES[:3]
# Indices to each step when a family spreads frames over time. Those of MAX_FRAMES steps are exact in float32.
_STEP_INDICES = 4096


@dataclass(frozen=True, slots=True)
class FrameSampling:
    """A request's settings for the frames of one media item; None selects the checkpoint's default.

    fps: frames a second. min_frames, max_frames: bounds on their number. max_pixels: of one frame after resizing.
    start_s, end_s: seconds from the video's start.
    allow_truncated: take a video of which more than a tenth of the frames is missing.
    num_frames: so many, evenly spaced, or all if there are fewer. frame_indices: exactly these; empty selects the
        default.
    max_slices: of an image, or each frame, besides the whole; 1: none. Families check its range.
    mode: one of SAMPLING_MODES; what else is set then says how many frames at most, and of which part.
    Raises InvalidRequest for a value outside its range.
    """

    fps: float | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    max_pixels: int | None = None
    start_s: float | None = None
    end_s: float | None = None
    allow_truncated: bool = False
    num_frames: int | None = None
    frame_indices: tuple[int, ...] = ()
    max_slices: int | None = None
    mode: str | None = None

    @property
    def chooses_frames(self) -> bool:
        """Whether any setting says which frames are used."""
        return bool(self.frame_indices) or any(
            getattr(self, name) is not None for name in (*_OTHER_TIMES, "num_frames")
        )

    def __post_init__(self) -> None:
        self._check_exact()
        if self.mode is not None and self.mode not in SAMPLING_MODES:
            limit = f"{', '.join(SAMPLING_MODES[:-1])} or {SAMPLING_MODES[-1]}"
            raise InvalidRequest(field="frame_sampling.mode", limit=limit, value=self.mode)
        if self.fps is not None and not 0 < self.fps <= MAX_FPS:
            limit = f"above 0 and at most {MAX_FPS:g}"
            raise InvalidRequest(field="frame_sampling.fps", limit=limit, value=self.fps)
        for name in ("min_frames", "max_frames", "num_frames"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= MAX_FRAMES:
                limit = f"between 1 and {MAX_FRAMES}"
                raise InvalidRequest(field=f"frame_sampling.{name}", limit=limit, value=value)
        if self.min_frames is not None and self.max_frames is not None and self.max_frames < self.min_frames:
            limit = f"at least min_frames {self.min_frames}"
            raise InvalidRequest(field="frame_sampling.max_frames", limit=limit, value=self.max_frames)
        for name, time in (("start_s", self.start_s), ("end_s", self.end_s)):
            if time is not None and not (math.isfinite(time) and time >= 0):
                raise InvalidRequest(field=f"frame_sampling.{name}", limit="at least 0", value=time)
        if self.end_s is not None and self.end_s <= (self.start_s or 0):
            limit = f"above the start, {self.start_s or 0:g}"
            raise InvalidRequest(field="frame_sampling.end_s", limit=limit, value=self.end_s)

    def _check_exact(self) -> None:
        exact = (("num_frames", _OTHER_COUNTS), ("frame_indices", (*_OTHER_TIMES, "num_frames", "mode")))
        for name, others in exact:
            together = [other for other in others if getattr(self, other) is not None]
            if getattr(self, name) and together:
                text = f"must not be set together with {together[0]}"
                raise InvalidRequest(text, field=f"frame_sampling.{name}")
        indices, field = self.frame_indices, "frame_sampling.frame_indices"
        if len(indices) > MAX_FRAMES:
            raise InvalidRequest(field=field, limit=f"at most {MAX_FRAMES} indices", value=len(indices))
        if indices and indices[0] < 0:
            raise InvalidRequest(field=field, limit="at least 0", value=indices[0])
        for before, after in pairwise(indices):
            if after <= before:
                raise InvalidRequest(f"must be strictly increasing, got {after} after {before}", field=field)


@dataclass(frozen=True, slots=True)
class FrameBounds:
    """How densely a video is sampled: the checkpoint's defaults, or these merged with a request's settings.

    num_frames: the number of frames that a request asks for; the other bounds then have no effect.
    group_frames: of families that send frames in groups, how many are in each: (frames, their length in seconds) ->
        frames of a group.
    """

    fps: float
    min_frames: int
    max_frames: int
    temporal_patch: int
    num_frames: int | None = None
    group_frames: Callable[[int, Fraction], int] | None = None

    def merged(self, wish: FrameSampling) -> FrameBounds:
        """The bounds overridden by `wish`. A default bound that conflicts with a requested one is adjusted to it."""
        low = wish.min_frames or min(self.min_frames, wish.max_frames or MAX_FRAMES)
        high = wish.max_frames or max(self.max_frames, low)
        return replace(self, fps=wish.fps or self.fps, min_frames=low, max_frames=high, num_frames=wish.num_frames)


# (frames, their average rate, bounds) -> indices below `frames`, not decreasing, at least one.
PickIndices: TypeAlias = Callable[[int, Fraction, FrameBounds], Sequence[int]]
# (begin, end) -> places in [begin, end), increasing.
FindPlaces: TypeAlias = Callable[[int, int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class FrameRate:
    """Frames a second, and whether every frame follows it to within a tick."""

    per_s: Fraction
    constant: bool


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """Presentation times of the frames of a video, or of a cut of one.

    ticks: increasing, at least one, in units of time_base seconds; of a file, relative to the video's first frame.
    tail_ticks: duration of the last frame.
    rates: frames a second as the container declares them, most trusted first.
    """

    ticks: Sequence[int]
    tail_ticks: int
    time_base: Fraction
    rates: tuple[Fraction, ...]

    @classmethod
    def of_seconds(cls, times_s: Sequence[float]) -> Self:
        """Times of single pictures, at least a microsecond apart, in milliseconds if all are whole ones.

        The last lasts as long as the others on average, and a single one a second. If all are evenly spaced to within a
        tick, that is the rate, as if a container had declared it.
        """
        ticks, per_s = [round(time_s * TICKS_PER_S) for time_s in times_s], TICKS_PER_S
        if all(tick % 1000 == 0 for tick in ticks):
            ticks, per_s = [tick // 1000 for tick in ticks], per_s // 1000
        if len(ticks) == 1:
            return cls(ticks, per_s, Fraction(1, per_s), (Fraction(1),))
        step = Fraction(ticks[-1] - ticks[0], len(ticks) - 1)
        times = cls(array("q", ticks), max(1, round(step)), Fraction(1, per_s), ())
        step_s = (step / per_s).limit_denominator(1000)
        declared = [1 / step_s] if step_s else []
        declared.append(round(per_s / step / _NTSC) * _NTSC)
        rates = tuple(rate for rate in declared if rate > 0 and times._keeps_to(rate))
        return replace(times, rates=rates)

    @property
    def length_s(self) -> Fraction:
        """From the first frame to the end of the last."""
        return (self.ticks[-1] - self.ticks[0] + self.tail_ticks) * self.time_base

    def cut(self, start_s: float | None, end_s: float | None, varies: bool) -> tuple[int, FrameTimes]:
        """The place of its first frame, and the frames that appear in [start_s, end_s).

        varies: whether the rate does. If so, or if none appears, the frame on screen at start_s is the first of them,
        and shown from then on. Raises InvalidRequest for a part without frames.
        """
        over = self.ticks[-1] + self.tail_ticks
        start = _ticks_from(start_s or 0, self.time_base)
        stop = over if end_s is None else min(over, _ticks_from(end_s, self.time_base))
        first, end = bisect.bisect_left(self.ticks, start), bisect.bisect_left(self.ticks, stop)
        appears = first < end and (not varies or self.ticks[first] == start)
        on_screen = first > 0 and start < stop and not appears
        if first >= end and not on_screen:
            between = _between(start_s, end_s)
            text = f"selects nothing: no frame appears {between}, the video lasts {float(self.length_s):.3f} s"
            raise InvalidRequest(text, field=f"frame_sampling.{'end_s' if start_s is None else 'start_s'}")
        ticks = array("q", (start, *self.ticks[first:end])) if on_screen else self.ticks[first:end]
        next_tick = self.ticks[end] if end < len(self.ticks) else over
        part = replace(self, ticks=ticks, tail_ticks=min(next_tick, stop) - ticks[-1])
        return first - on_screen, part

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

    def shown_ticks(self) -> list[int]:
        """How long each frame is shown."""
        return [*(after - tick for tick, after in pairwise(self.ticks)), self.tail_ticks]

    def timestamp_s(self, place: int, rate: FrameRate) -> float:
        """When a frame is shown: place / rate after the first at a constant rate, as in transformers."""
        if rate.constant:
            return float(self.ticks[0] * self.time_base) + place / float(rate.per_s)
        return float(self.ticks[place] * self.time_base)

    def mean_step_s(self, places: Sequence[int], rate: FrameRate) -> Fraction:
        """From one of these frames to the next on average; for a single one that of all frames."""
        first, last, steps = places[0], places[-1], len(places) - 1
        if not steps:
            return 1 / rate.per_s
        if rate.constant:
            return (last - first) / (steps * rate.per_s)
        return (self.ticks[last] - self.ticks[first]) * self.time_base / steps

    def _keeps_to(self, per_s: Fraction) -> bool:
        interval = 1 / (per_s * self.time_base)
        # In integers: Fractions are too slow for hours of video. Of 64 bits where they suffice.
        step, frames, count = interval.numerator, interval.denominator, len(self.ticks)
        largest = max((self.ticks[-1] - self.ticks[0]) * frames, count * step)
        shown = np.asarray(self.ticks, np.int64 if largest < 2**62 else object) - self.ticks[0]
        return bool((abs(shown * frames - np.arange(count, dtype=shown.dtype) * step) <= frames).all())


@dataclass(frozen=True, slots=True)
class Sampled:
    """The selected frames: places in the whole video's ticks, padded to whole temporal patches.

    frames: their number before padding, which determines seconds_per_grid.
    timestamps_s: when each is shown, from the video's start.
    source_fps: frames a second of the video, if every frame keeps to it.
    """

    places: tuple[int, ...]
    frames: int
    timestamps_s: tuple[float, ...]
    seconds_per_grid: Fraction
    source_fps: Fraction | None


def sample(
    times: FrameTimes, bounds: FrameBounds, wish: FrameSampling, pick: PickIndices, find: FindPlaces | None = None
) -> Sampled:
    """Selects frames of the part of a video that `wish` names.

    find: of a mode, the frames that it chooses by: keyframes, or the first of each shot. As many are sampled as would
    be uniformly, of keyframes all if there are fewer. The result is that of their `frame_indices`.
    Raises InvalidRequest if that part has no frames, or the video not those that `wish` names.
    """
    if wish.frame_indices:
        return _exactly(times, wish.frame_indices, bounds.temporal_patch)
    whole = times.rate()
    first, part = times.cut(wish.start_s, wish.end_s, varies=not whole.constant)
    if part.ticks[0] != times.ticks[first]:
        whole = replace(whole, constant=False)
    rate = whole if whole.constant else part.rate()
    merged = bounds.merged(wish)
    within = _chosen(part, rate, merged, pick)
    if find is not None:
        found = [place - first for place in _found(find, first, part, wish)]
        if len(found) < len(part.ticks):
            if wish.mode == SHOTS and len(found) < len(within):
                within = _by_shot(part, found, min(len(within), len(part.ticks)))
            else:
                within = _among(part, found, replace(merged, num_frames=len(within)), pick)
            return _exactly(times, [first + place for place in within], bounds.temporal_patch)
    step_s = len(part.ticks) / (len(within) * rate.per_s) if rate.constant else part.mean_step_s(within, rate)
    places = [first + place for place in within]
    if whole.constant:
        times_s = [times.timestamp_s(place, whole) for place in places]
    else:
        times_s = [part.timestamp_s(place, whole) for place in within]
    return _padded(places, times_s, step_s, bounds.temporal_patch, whole)


def _exactly(times: FrameTimes, indices: Sequence[int], temporal_patch: int) -> Sampled:
    """The frames at `indices`. The step between slices is that of the frames on average."""
    total, rate = len(times.ticks), times.rate()
    if indices[-1] >= total:
        limit = f"below {total}, the number of frames"
        raise InvalidRequest(field="frame_sampling.frame_indices", limit=limit, value=indices[-1])
    times_s = [times.timestamp_s(place, rate) for place in indices]
    return _padded(indices, times_s, times.mean_step_s(indices, rate), temporal_patch, rate)


def _chosen(times: FrameTimes, rate: FrameRate, bounds: FrameBounds, pick: PickIndices) -> Sequence[int]:
    """The places of the frames of a part: all, those at the indices of its family, or spread over time."""
    total = len(times.ticks)
    if bounds.num_frames is not None and bounds.num_frames >= total:
        return range(total)
    picked = pick(total, rate.per_s, bounds)
    if rate.constant or len(picked) == total:
        return picked
    # The same number, now as its family spreads it over many more indices than there are frames.
    indices = len(picked) * _STEP_INDICES
    per_s = rate.per_s * indices / total  # they last as long as the part
    return _at_even_times(times, pick(indices, per_s, replace(bounds, num_frames=len(picked))), indices)


def _found(find: FindPlaces, first: int, part: FrameTimes, wish: FrameSampling) -> Sequence[int]:
    """What `find` finds in a part that begins at `first`. Raises InvalidRequest for nothing."""
    found = find(first, first + len(part.ticks))
    if not found:
        raise InvalidRequest(
            f"{wish.mode} selects nothing: no keyframe appears {_between(wish.start_s, wish.end_s)}",
            field="frame_sampling.mode",
            value=wish.mode,
            remedy=f"set `frame_sampling.mode` to {UNIFORM}",
        )
    return found


def _among(times: FrameTimes, places: Sequence[int], bounds: FrameBounds, pick: PickIndices) -> list[int]:
    """Those of `places` that would be sampled of a video that has no other frames. times: of the part."""
    ticks = array("q", (times.ticks[place] for place in places))
    tail_ticks = times.ticks[-1] + times.tail_ticks - ticks[-1]
    alone = FrameTimes(ticks, tail_ticks, times.time_base, ())
    return [places[number] for number in _chosen(alone, alone.rate(), bounds, pick)]


def _by_shot(times: FrameTimes, firsts: Sequence[int], frames: int) -> list[int]:
    """The places in `firsts`, and others up to `frames`: each goes to the shot whose frames are furthest apart.

    times: of the part, which has at least so many frames. The frames of a shot are evenly spread over its time.
    """
    ends = [*firsts[1:], len(times.ticks)]
    ticks = [*times.ticks, times.ticks[-1] + times.tail_ticks]
    shots = list(zip(firsts, ends, strict=True))
    counts = [1] * len(shots)
    steps = [(float(ticks[first] - ticks[end]), shot) for shot, (first, end) in enumerate(shots) if end - first > 1]
    heapq.heapify(steps)  # the longest first
    for _ in range(frames - len(shots)):
        _, shot = heapq.heappop(steps)
        first, end = shots[shot]
        counts[shot] += 1
        if counts[shot] < end - first:
            heapq.heappush(steps, ((ticks[first] - ticks[end]) / counts[shot], shot))
    places: list[int] = []
    for (first, end), count in zip(shots, counts, strict=True):
        alone = FrameTimes(times.ticks[first:end], ticks[end] - ticks[end - 1], times.time_base, ())
        indices = [number * _STEP_INDICES for number in range(count)]
        places += [first + place for place in _at_even_times(alone, indices, count * _STEP_INDICES)]
    return places


def _at_even_times(times: FrameTimes, indices: Sequence[int], end: int) -> tuple[int, ...]:
    """The frames shown at `indices` of `end`, where a frame that is shown for longer than a step counts one step.

    The indices are fewer than the frames, and a step is end / len(indices) of them: where they are a step apart, each
    frame that is shown for a step or longer is at exactly one, and no frame is at two.
    """
    shown = times.shown_ticks()
    step = _step(shown, len(indices))
    # In integers: Fractions are too slow for hours of video.
    counted = (min(ticks * step.denominator, step.numerator) for ticks in shown)
    begins = list(accumulate(counted, initial=0))
    return tuple(bisect.bisect_right(begins, index * begins[-1] // end) - 1 for index in indices)


def _step(shown: Sequence[int], frames: int) -> Fraction:
    """The step of which so many make up the time in which every frame counts at most one. frames: at most all."""
    rest = sum(shown)
    for left, longest in zip(range(frames, 0, -1), heapq.nlargest(frames, shown), strict=True):
        if longest * left <= rest:
            return Fraction(rest, left)
        rest -= longest
    raise AssertionError(f"{frames} steps of {len(shown)} frames")


def _padded(
    places: Sequence[int], times_s: Sequence[float], seconds_per_frame: Fraction, temporal_patch: int, rate: FrameRate
) -> Sampled:
    """The frames at `places`, the last repeated to a whole temporal patch."""
    missing = -len(places) % temporal_patch
    return Sampled(
        places=(*places, *[places[-1]] * missing),
        frames=len(places),
        timestamps_s=(*times_s, *[times_s[-1]] * missing),
        seconds_per_grid=temporal_patch * seconds_per_frame,
        source_fps=rate.per_s if rate.constant else None,
    )


def _between(start_s: float | None, end_s: float | None) -> str:
    return f"between {start_s or 0:g} s and {'the end' if end_s is None else f'{end_s:g} s'}"


def _ticks_from(time_s: float, time_base: Fraction) -> int:
    """The first tick at or after a time, the time read as its shortest decimal."""
    return math.ceil(Fraction(str(time_s)) / time_base)
