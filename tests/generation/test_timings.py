"""Each instant before the first token belongs to the earliest stage that has not finished."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.generation.rpc.timing import Stage, StageClock

marks = st.dictionaries(st.sampled_from([stage for stage in Stage if stage is not Stage.PREFILL]), st.integers(0, 50))


def clock_at(*times_ns: int) -> StageClock:
    ticks = iter(times_ns)
    return StageClock(lambda: next(ticks))


def owner(instant: int, finished: dict[Stage, int]) -> Stage:
    """The earliest stage unfinished at an instant; finishing a stage finishes all earlier ones."""
    return next(
        stage
        for stage in Stage
        if all(finished.get(later, 1000) > instant for later in Stage if later >= stage) or stage is Stage.PREFILL
    )


@settings(max_examples=60)
@given(start=st.integers(0, 9), marks=marks, first_token=st.integers(0, 60))
def test_stages_sum_to_the_time_to_first_token_and_own_their_instants(
    start: int, marks: dict[Stage, int], first_token: int
) -> None:
    # Events are recorded in the order of time.
    finished = {stage: start + after for stage, after in marks.items() if after <= first_token}
    clock = clock_at(start)
    for stage, at_ns in sorted(finished.items(), key=lambda note: note[1]):
        clock.finish(stage, at_ns)
    clock.token(start + first_token)
    durations = clock.stages_ns()
    assert sum(durations.values()) == first_token == clock.first_token_ns
    instants = [owner(instant, finished) for instant in range(start, start + first_token)]
    assert durations == {stage: instants.count(stage) for stage in Stage}


def test_a_stage_that_finishes_while_an_earlier_one_runs_takes_no_time() -> None:
    clock = clock_at(0)
    clock.skip(Stage.FETCH)
    clock.finish(Stage.PLAN, 3)
    clock.finish(Stage.DECODE, 9)
    clock.finish(Stage.RESIZE, 8)
    clock.finish(Stage.ENCODE, 7)
    clock.finish(Stage.PRUNE, 9)
    clock.finish(Stage.TRANSFER, 10)
    clock.finish(Stage.WAIT_FOR_PREFILL, 10)
    clock.token(14)
    took = {stage: duration for stage, duration in clock.stages_ns().items() if duration}
    assert took == {Stage.PLAN: 3, Stage.DECODE: 6, Stage.TRANSFER: 1, Stage.PREFILL: 4}


def test_the_first_recorded_end_of_a_stage_counts() -> None:
    clock = clock_at(0, 5, 6)
    clock.finish(Stage.FETCH)
    clock.finish(Stage.FETCH)
    clock.token(7)
    assert clock.stages_ns()[Stage.FETCH] == 5


def test_work_finished_before_the_request_takes_none_of_its_time() -> None:
    clock = clock_at(100)
    clock.skip(Stage.FETCH)
    clock.finish(Stage.PLAN, 110)
    clock.finish(Stage.DECODE, -(10**30))
    clock.finish(Stage.RESIZE, 90)
    clock.finish(Stage.TRANSFER, 120)
    clock.token(130)
    took = {stage: duration for stage, duration in clock.stages_ns().items() if duration}
    assert took == {Stage.PLAN: 10, Stage.WAIT_FOR_ENCODER: 10, Stage.WAIT_FOR_PREFILL: 10}


def test_tokens_after_the_first_count_as_generation() -> None:
    clock = clock_at(100)
    assert [clock.token(at_ns) for at_ns in (110, 120, 150)] == [True, False, False]
    assert (clock.first_token_ns, clock.generate_ns) == (10, 40)
