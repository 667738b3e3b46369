"""Buckets of the tower's forwards: how much of a queue goes into one, which one holds it, and whether a replay pays."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.encoder.tower.graph_buckets import (
    Eager,
    Measured,
    Size,
    bucket_size,
    choose,
    fitting,
    graph_buckets,
    pays,
    token_limit,
)

WINDOW_SIDE = 4


@st.composite
def sizes(draw: st.DrawFn) -> Size:
    rows, columns = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    return Size(rows * columns, 1, -(-rows // WINDOW_SIDE) * -(-columns // WINDOW_SIDE))


def total(slices: list[Size]) -> Size:
    return Size(*(sum(getattr(each, name) for each in slices) for name in ("tokens", "slices", "windows")))


def holds(bucket: Size, load: Size) -> bool:
    return load.tokens <= bucket.tokens and load.slices <= bucket.slices and load.windows <= bucket.windows


def buckets_up_to(most_tokens: int) -> list[Size]:
    return [bucket_size(each, WINDOW_SIDE**2) for each in graph_buckets(64, most_tokens)]


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [(64, 800, (64, 128, 256, 512, 800)), (64, 512, (64, 128, 256, 512)), (64, 64, (64,)), (64, 63, (63,))],
)
def test_buckets_double_up_to_the_most(least: int, most: int, expected: tuple[int, ...]) -> None:
    assert graph_buckets(least, most) == expected


def test_a_bucket_holds_slices_of_32_tokens_and_twice_its_full_windows() -> None:
    assert bucket_size(800, 16) == Size(800, 25, 100)
    assert bucket_size(2048, 0) == Size(2048, 64, 0)
    assert bucket_size(1, 16) == Size(1, 1, 1)


@settings(max_examples=50)
@given(queue=st.lists(sizes(), min_size=1, max_size=40), most=st.integers(1, 3000))
def test_batches_keep_the_order_of_the_queue_and_are_as_long_as_the_limits_allow(queue: list[Size], most: int) -> None:
    for largest in (bucket_size(most, WINDOW_SIDE**2), token_limit(most)):
        left, batches = list(queue), []
        while left:
            count = fitting(left, largest)
            assert count
            batches.append(left[:count])
            left = left[count:]
        assert [each for batch in batches for each in batch] == queue
        for batch in batches:
            assert len(batch) == 1 or holds(largest, total(batch))
        for batch, after in pairwise(batches):
            assert not holds(largest, total([*batch, after[0]]))


def test_every_limit_ends_a_batch() -> None:
    largest = Size(100, 10, 20)
    assert fitting([Size(30, 1, 1)] * 20, largest) == 3
    assert fitting([Size(1, 1, 1)] * 20, largest) == 10
    assert fitting([Size(4, 1, 6)] * 20, largest) == 3
    assert fitting([Size(101, 1, 1), Size(1, 1, 1)], largest) == 1
    assert fitting([], largest) == 0
    assert fitting([Size(1, 1, 1)] * 300, token_limit(200)) == 200  # only tokens


@settings(max_examples=50)
@given(slices=st.lists(sizes(), min_size=1, max_size=20), most=st.integers(65, 3000))
def test_the_chosen_bucket_is_the_smallest_that_holds_the_load(slices: list[Size], most: int) -> None:
    load, ascending = total(slices), buckets_up_to(most)
    chosen = choose(load, ascending)
    if isinstance(chosen, Eager):
        assert not any(holds(each, load) for each in ascending)
        return
    assert holds(chosen, load)
    assert not any(holds(each, load) for each in ascending[: ascending.index(chosen)])


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Size(64, 2, 8), Size(64, 2, 8)),
        (Size(65, 1, 1), Size(128, 4, 16)),
        (Size(12, 3, 3), Size(128, 4, 16)),
        (Size(12, 2, 9), Size(128, 4, 16)),
        (Size(200, 1, 25), Size(200, 7, 25)),
        (Size(201, 1, 1), Eager.TOKENS),
        (Size(100, 8, 1), Eager.SLICES),
        (Size(100, 1, 26), Eager.WINDOWS),
    ],
)
def test_loads_and_their_buckets_of_up_to_200_tokens(load: Size, expected: Size | Eager) -> None:
    assert choose(load, buckets_up_to(200)) == expected
    assert choose(load, []) is Eager.NONE_CAPTURED


@pytest.mark.parametrize(
    ("tokens", "chosen", "expected"),
    [
        (64, 0, True),
        (1, 0, True),  # below the first bucket, the time without a graph is constant
        (128, 1, True),
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
