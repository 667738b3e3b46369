"""Frames are selected at the indices that a family picks. Videos whose rate varies: test_plans."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.preprocessing.video.sampling import (
    FrameBounds,
    FrameRate,
    FrameSampling,
    FrameTimes,
    Sampled,
    sample,
)
from tests.preprocessing.preprocessing_media import transformers_indices

BOUNDS = FrameBounds(fps=2.0, min_frames=4, max_frames=768, temporal_patch=2)
RATES = [Fraction(10), Fraction(24000, 1001)]


def constant(frames: int, rate: Fraction | int, time_base: Fraction = Fraction(1, 90000)) -> FrameTimes:
    """Frames at a constant rate, their times rounded to the time base as containers round them."""
    ticks = tuple(round(index / (rate * time_base)) for index in range(frames))
    return FrameTimes(ticks, round(1 / (rate * time_base)), time_base, (Fraction(rate),))


def pick(total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> list[int]:
    """The indices of transformers for Qwen2.5-VL."""
    return transformers_indices(total_frames, float(average_rate), bounds.fps, bounds.min_frames, bounds.max_frames)


def sampled_of(times: FrameTimes, **wish: float) -> Sampled:
    return sample(times, BOUNDS, FrameSampling(**wish), pick)  # type: ignore[arg-type]


@pytest.mark.parametrize("rate", RATES)
def test_rounded_times_of_a_constant_rate_do_not_shift_indices(rate: Fraction) -> None:
    times = constant(301, rate, Fraction(1, 1000))
    sampled = sampled_of(times)
    expected = transformers_indices(301, float(rate), 2.0, 4, 768)
    assert list(sampled.places) == expected
    assert times.rate() == FrameRate(rate, constant=True)
    assert sampled.timestamps_s == tuple(index / float(rate) for index in expected)


def test_a_declared_rate_that_the_frames_contradict_is_ignored() -> None:
    times = FrameTimes(tuple(range(0, 100_000, 1000)), 1000, Fraction(1, 1000), (Fraction(90000),))
    assert times.rate() == FrameRate(Fraction(1), constant=False)


@pytest.mark.parametrize("rate", RATES)
def test_a_cut_excludes_frames_before_its_start_and_at_its_end_and_keeps_their_times(rate: Fraction) -> None:
    times = constant(600, rate, Fraction(1, 1000))
    start, end = times.ticks[199] + 0.25, times.ticks[400]
    sampled = sampled_of(times, start_s=start / 1000, end_s=end / 1000)
    within = transformers_indices(200, float(rate), 2.0, 4, 768)
    assert list(sampled.places)[: len(within)] == [200 + index for index in within]
    assert sampled.timestamps_s == tuple(place / float(rate) for place in sampled.places)
    assert sampled.seconds_per_grid == 2 * 200 / (len(within) * rate)


def test_a_constant_rate_cut_of_a_variable_rate_video_keeps_its_times() -> None:
    # 100 frames at 10 a second, then 300 at 30 a second, of which the cut takes some.
    ticks = (*range(0, 30_000, 300), *range(30_000, 60_000, 100))
    times = FrameTimes(ticks, 100, Fraction(1, 3000), (Fraction(30),))
    sampled = sampled_of(times, start_s=12.0, end_s=15.0)
    assert [place - 160 for place in sampled.places] == transformers_indices(90, 30.0, 2.0, 4, 768)
    assert sampled.timestamps_s == tuple(10 + (place - 100) / 30 for place in sampled.places)


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ({"fps": 0.0}, r"fps must be above 0 and at most 1000, got 0\.0"),
        ({"fps": math.nan}, "fps must be above 0 and at most 1000, got nan"),
        ({"min_frames": 0}, "min_frames must be between 1 and 768, got 0"),
        ({"max_frames": 769}, "max_frames must be between 1 and 768, got 769"),
        ({"min_frames": 8, "max_frames": 7}, "max_frames must be at least min_frames 8, got 7"),
        ({"start_s": -1.0}, r"start_s must be at least 0, got -1\.0"),
        ({"end_s": math.inf}, "end_s must be at least 0, got inf"),
        ({"start_s": 2.0, "end_s": 2.0}, "end_s must be above the start, 2, got 2"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_field_value_and_limit(wish: dict[str, float], named: str) -> None:
    with pytest.raises(InvalidRequest, match=named):
        FrameSampling(**wish)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wish", "low", "high"),
    [
        (FrameSampling(), 4, 768),
        (FrameSampling(max_frames=2), 2, 2),
        (FrameSampling(min_frames=16), 16, 768),
        (FrameSampling(min_frames=2, max_frames=6), 2, 6),
    ],
)
def test_a_default_bound_is_adjusted_to_a_requested_one(wish: FrameSampling, low: int, high: int) -> None:
    merged = BOUNDS.merged(wish)
    assert (merged.min_frames, merged.max_frames, merged.fps) == (low, high, 2.0)
