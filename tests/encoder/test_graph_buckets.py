"""Buckets of the tower's forwards: how much of a queue goes into one, which one holds it, and whether a replay pays."""

from __future__ import annotations

import math
from itertools import chain, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridsieve.services.compute.graphs import doubling
from gridsieve.services.encoder.tower.graph_buckets import (
    Measured,
    Size,
    choose,
    fitting,
    packing_size,
    pays,
    token_limit,
)
from gridsieve.services.encoder.tower.graphs import bucket_ranges
from gridsieve.services.encoder.tower.packing import Side, TowerShape, lay_out, pad

SIZES = st.builds(lambda tokens, windows: Size(tokens, 1, windows, tokens), st.integers(1, 500), st.integers(1, 40))
SMALL = [Size(64, 2, 8, 64), Size(128, 4, 16, 128), Size(256, 8, 32, 256)]
WINDOWED = TowerShape(merge=2, window_side=4)


def holds(bucket: Size, slices: list[Size]) -> bool:
    return (
        sum(each.tokens for each in slices) <= bucket.tokens
        and len(slices) <= bucket.slices
        and sum(each.windows for each in slices) <= bucket.windows
        and max(each.longest for each in slices) <= bucket.longest
    )


def buckets_up_to(most_tokens: int, shape: TowerShape = WINDOWED) -> list[Size]:
    return list(dict.fromkeys(chain.from_iterable(bucket_ranges(shape, most_tokens))))


def test_buckets_double_up_to_the_most_with_many_short_slices_or_few_long_ones_and_four_times_their_windows() -> None:
    short = [Size(64, 8, 16, 64), Size(128, 8, 32, 128), Size(256, 8, 64, 256), Size(300, 10, 75, 256)]
    assert bucket_ranges(WINDOWED, 300) == [short, [*short[:3], Size(300, 8, 75, 300)]]
    assert doubling(64, 128) == (64, 128)
    assert doubling(64, 63) == (63,)


def test_buckets_of_slices_of_one_size_hold_whole_ones() -> None:
    clip = TowerShape(1, lead=1, dropped=1, fixed=Side(24, 24))
    assert bucket_ranges(clip, 2000) == [[Size(576, 1, 0, 576), Size(1152, 2, 0, 576), Size(2000, 4, 0, 576)]]


@pytest.mark.parametrize("merge", [1, 2])
@pytest.mark.parametrize("most_patches", [8192, 65536])
def test_attention_launches_at_most_eight_times_the_blocks_that_a_full_bucket_needs(
    merge: int, most_patches: int
) -> None:
    """A block per slice, or window, and 128 rows of the longest that it is told; once, a slice was as long as the
    bucket. A window has 64 patches."""
    shape = TowerShape(merge, window_side=8 // merge)
    for bucket in buckets_up_to(most_patches // merge**2, shape):
        layout = pad(lay_out([Side(merge, merge)], shape), bucket, shape)
        launched = (len(layout.ends) - 1) * math.ceil(layout.longest / 128)
        assert launched <= 8 * math.ceil(len(layout.positions) / 128)
        assert layout.window_ends is not None
        assert layout.longest_window <= 64
        assert len(layout.window_ends) - 1 <= 8 * math.ceil(len(layout.positions) / 128)


@given(length=st.integers(32, 2048), most=st.sampled_from([2048, 16384]), data=st.data())
def test_equal_slices_are_replayed_in_the_smallest_bucket_of_so_many_tokens(
    length: int, most: int, data: st.DataObject
) -> None:
    tokens = length * data.draw(st.integers(1, most // length))
    chosen = choose(Size(tokens, tokens // length, 0, length), buckets_up_to(most, TowerShape(2)))
    assert isinstance(chosen, Size)
    assert chosen.tokens == next(each for each in doubling(64, most) if each >= tokens)


@settings(max_examples=50)
@given(queue=st.lists(SIZES, min_size=1, max_size=40), most=st.integers(1, 3000))
def test_batches_keep_the_order_of_the_queue_and_are_as_long_as_the_limits_allow(queue: list[Size], most: int) -> None:
    for largest in (packing_size(buckets_up_to(most)), token_limit(most)):
        left, batches = list(queue), []
        while left:
            count = fitting(left, largest)
            assert count
            batches.append(left[:count])
            left = left[count:]
        assert all(len(batch) == 1 or holds(largest, batch) for batch in batches)
        assert not any(holds(largest, [*batch, after[0]]) for batch, after in pairwise(batches))


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
    times = zip(SMALL, [(0.005, 0.006), (0.007, 0.008), (0.020, 0.020)], strict=True)
    measured = [Measured(each, *taken) for each, taken in times]
    assert pays(Size(tokens, 1, 1, tokens), measured[chosen].bucket, measured) is expected
