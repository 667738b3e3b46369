"""Buckets of the tower's forwards: how much of a queue goes into one, which one holds it, and whether a replay pays."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.encoder.tower.graph_buckets import (
    Measured,
    Size,
    bucket_size,
    choose,
    fitting,
    graph_buckets,
    pays,
    token_limit,
)

WINDOW_TOKENS = 16
SIZES = st.builds(Size, st.integers(1, 500), st.just(1), st.integers(1, 40))


def holds(bucket: Size, slices: list[Size]) -> bool:
    load = sum(slices, Size(0, 0, 0))
    return load.tokens <= bucket.tokens and load.slices <= bucket.slices and load.windows <= bucket.windows


def buckets_up_to(most_tokens: int) -> list[Size]:
    return [bucket_size(each, WINDOW_TOKENS) for each in graph_buckets(64, most_tokens)]


def test_buckets_double_up_to_the_most_and_hold_slices_of_32_tokens_and_twice_their_full_windows() -> None:
    assert buckets_up_to(200) == [Size(64, 2, 8), Size(128, 4, 16), Size(200, 7, 25)]
    assert graph_buckets(64, 128) == (64, 128)
    assert graph_buckets(64, 63) == (63,)
    assert bucket_size(2048, 0) == Size(2048, 64, 0)


@settings(max_examples=50)
@given(queue=st.lists(SIZES, min_size=1, max_size=40), most=st.integers(1, 3000))
def test_batches_keep_the_order_of_the_queue_and_are_as_long_as_the_limits_allow(queue: list[Size], most: int) -> None:
    for largest in (bucket_size(most, WINDOW_TOKENS), token_limit(most)):
        left, batches = list(queue), []
        while left:
            count = fitting(left, largest)
            assert count
            batches.append(left[:count])
            left = left[count:]
        assert all(len(batch) == 1 or holds(largest, batch) for batch in batches)
        assert not any(holds(largest, [*batch, after[0]]) for batch, after in pairwise(batches))


def test_the_chosen_bucket_is_the_smallest_that_holds_the_load() -> None:
    """By tokens, by slices, and by windows."""
    for load in (Size(65, 1, 1), Size(12, 3, 3), Size(12, 2, 9)):
        assert choose(load, buckets_up_to(200)) == Size(128, 4, 16), load


@pytest.mark.parametrize(
    ("tokens", "chosen", "expected"),
    [
        (1, 0, True),  # below the first bucket, the time without a graph is constant
        (96, 1, True),  # 7 ms, halfway from 6 to 8, equals the replay
        (95, 1, False),
        (256, 2, True),
        (255, 2, False),
    ],
)
def test_a_replay_pays_if_it_takes_no_longer_than_the_load_without_padding(
    tokens: int, chosen: int, expected: bool
) -> None:
    times = zip(buckets_up_to(256), [(0.005, 0.006), (0.007, 0.008), (0.020, 0.020)], strict=True)
    measured = [Measured(each, *taken) for each, taken in times]
    assert pays(Size(tokens, 1, 1), measured[chosen].bucket, measured) is expected
