"""Which frames are looked at: those that transformers' processor picks, by time where the rate varies."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from services.preprocessing.sampling import FrameBounds, FrameRate, FrameSampling, FrameTimes, sample, sample_indices
from tests.unit.preprocessing_media import transformers_indices

BOUNDS = FrameBounds(fps=2.0, min_frames=4, max_frames=768, temporal_patch=2)
RATES = [Fraction(1), Fraction(10), Fraction(24000, 1001), Fraction(25), Fraction(30), Fraction(30000, 1001)]


def constant(frames: int, rate: Fraction | int, time_base: Fraction = Fraction(1, 90000)) -> FrameTimes:
    """Frames at a constant rate, their times rounded to the time base as containers round them."""
    ticks = tuple(round(index / (rate * time_base)) for index in range(frames))
    return FrameTimes(ticks, round(1 / (rate * time_base)), time_base, (Fraction(rate),))


@given(
    frames=st.integers(2, 4000) | st.integers(2, 3_000_000),
    rate=st.sampled_from(RATES) | st.fractions(Fraction(1, 2), 240, max_denominator=1001),
    fps=st.sampled_from([1.0, 2.0, 4.0, 23.976]) | st.floats(0.01, 120),
    low=st.integers(2, 64),
    high=st.integers(2, 768),
)
@example(frames=1195207, rate=Fraction(24000, 1001), fps=2.0, low=4, high=768)  # rounds by lanes of 8
@example(frames=1289433, rate=Fraction(1), fps=1.0, low=2, high=360)  # ends with half a pair of lanes
def test_indices_are_those_of_transformers(frames: int, rate: Fraction, fps: float, low: int, high: int) -> None:
    expected = transformers_indices(frames, float(rate), fps, low, high)
    picked = sample_indices(frames, rate, FrameBounds(fps, low, high, 2))
    # Rounding puts transformers' last index behind the last frame now and then; there it fails, and we leave it out.
    assert list(picked) == [index for index in expected if index < frames]


def test_an_index_that_rounding_puts_behind_the_last_frame_is_left_out() -> None:
    rate = Fraction(24000, 1001)
    theirs = transformers_indices(68, float(rate), 5.622115197626865, 4, 768)
    assert len(theirs) == 15
    assert theirs[-1] == 68  # of a video whose frames are 0 to 67
    sampled = sample(constant(68, rate), BOUNDS, FrameSampling(fps=5.622115197626865))
    assert list(sampled.places) == theirs[:-1]
    assert sampled.seconds_per_grid == 2 * 68 / (14 * rate)


def test_a_single_frame_is_sent_twice() -> None:
    sampled = sample(constant(1, 30), BOUNDS, FrameSampling())
    assert sampled.places == (0, 0)
    assert sampled.timestamps_s == (0.0, 0.0)
    assert sampled.seconds_per_grid == Fraction(2, 30)


@pytest.mark.parametrize("rate", RATES)
def test_rounded_times_of_a_constant_rate_do_not_move_an_index(rate: Fraction) -> None:
    times = constant(301, rate, Fraction(1, 1000))
    sampled = sample(times, BOUNDS, FrameSampling())
    expected = transformers_indices(301, float(rate), 2.0, 4, 768)
    assert list(sampled.places) == expected
    assert times.rate() == FrameRate(rate, constant=True)


def test_a_variable_rate_shows_the_last_frame_at_or_before_each_time() -> None:
    generator = random.Random(3)
    ticks = [0]
    for _ in range(199):
        ticks.append(ticks[-1] + generator.choice([10, 33, 40, 400]))
    average = Fraction(200 * 1000, ticks[-1] + 33)
    times = FrameTimes(tuple(ticks), 33, Fraction(1, 1000), (average,))
    expected = []
    for index in transformers_indices(200, float(average), 2.0, 4, 768):
        shown = [place for place, tick in enumerate(ticks) if Fraction(tick, 1000) <= index / average]
        expected.append(shown[-1])
    sampled = sample(times, BOUNDS, FrameSampling())
    assert list(sampled.places)[: len(expected)] == expected
    assert expected != transformers_indices(200, float(average), 2.0, 4, 768)
    assert sampled.timestamps_s == tuple(ticks[place] / 1000 for place in sampled.places)


def test_a_rate_that_the_frames_belie_is_not_believed() -> None:
    times = FrameTimes(tuple(range(0, 100_000, 1000)), 1000, Fraction(1, 1000), (Fraction(90000),))
    assert times.rate() == FrameRate(Fraction(1), constant=False)


def test_a_cut_leaves_out_what_appears_before_it_and_at_its_end() -> None:
    sampled = sample(constant(300, 30), BOUNDS, FrameSampling(start_s=2.0, end_s=5.0))
    within = transformers_indices(90, 30.0, 2.0, 4, 768)
    assert list(sampled.places) == [60 + index for index in within]
    assert sampled.timestamps_s[0] == 2.0
    assert max(sampled.timestamps_s) < 5.0
    assert sampled.seconds_per_grid == Fraction(2 * 90, len(within) * 30)


def test_a_cut_without_frames_is_refused_with_its_bounds() -> None:
    with pytest.raises(InvalidRequest, match=r"between 10 s and 11 s of a video of 1\.000 s"):
        sample(constant(30, 30), BOUNDS, FrameSampling(start_s=10.0, end_s=11.0))


@pytest.mark.parametrize(
    ("wish", "named"),
    [
        ({"fps": 0.0}, r"fps must be above 0 and at most 1000, got 0\.0"),
        ({"fps": 1001.0}, r"fps must be above 0 and at most 1000, got 1001\.0"),
        ({"fps": math.nan}, "fps must be above 0 and at most 1000, got nan"),
        ({"min_frames": 0}, "min_frames must be between 1 and 768, got 0"),
        ({"max_frames": 769}, "max_frames must be between 1 and 768, got 769"),
        ({"min_frames": 8, "max_frames": 7}, "max_frames must be at least min_frames 8, got 7"),
        ({"start_s": -1.0}, r"start_s must be at least 0, got -1\.0"),
        ({"end_s": math.inf}, "end_s must be at least 0, got inf"),
        ({"start_s": 2.0, "end_s": 2.0}, "end_s must be above start_s 2, got 2"),
    ],
)
def test_a_wish_outside_its_range_is_refused_with_field_value_and_limit(wish: dict[str, float], named: str) -> None:
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
def test_a_bound_that_is_not_named_gives_way_to_the_one_that_is(wish: FrameSampling, low: int, high: int) -> None:
    merged = BOUNDS.merged(wish)
    assert (merged.min_frames, merged.max_frames, merged.fps) == (low, high, 2.0)
