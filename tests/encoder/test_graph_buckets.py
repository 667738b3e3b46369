"""Budgets of the tower's forwards: what goes into one together, which one holds it, and whether that pays."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
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


def holds(room: Size, load: Size) -> bool:
    return load.tokens <= room.tokens and load.slices <= room.slices and load.windows <= room.windows


def ladder(most_tokens: int) -> list[Size]:
    return [bucket_size(each, WINDOW_SIDE**2) for each in graph_buckets(64, most_tokens)]


# --- which there are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("least", "most", "expected"),
    [
        (64, 800, (64, 128, 256, 512, 800)),
        (64, 512, (64, 128, 256, 512)),
        (64, 64, (64,)),
        (64, 65, (64, 65)),
        (64, 63, (63,)),
        (1, 1, (1,)),
    ],
)
def test_budgets_double_up_to_the_most(least: int, most: int, expected: tuple[int, ...]) -> None:
    assert graph_buckets(least, most) == expected


def test_a_budget_has_room_for_slices_of_32_tokens_and_for_windows_half_full() -> None:
    assert bucket_size(800, 16) == Size(800, 25, 100)
    assert bucket_size(2048, 0) == Size(2048, 64, 0)
    assert bucket_size(1, 16) == Size(1, 1, 1)


# --- what goes into one -----------------------------------------------------------------------------------------


@given(queue=st.lists(sizes(), min_size=1, max_size=40), most=st.integers(1, 3000))
def test_batches_are_the_queue_in_its_order_within_every_cap_and_none_could_be_longer(
    queue: list[Size], most: int
) -> None:
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


@given(queue=st.lists(sizes(), max_size=40), most=st.integers(1, 3000))
def test_where_only_tokens_count_nothing_else_ends_a_batch(queue: list[Size], most: int) -> None:
    tokens, expected = 0, 0
    for each in queue:
        tokens += each.tokens
        if expected and tokens > most:
            break
        expected += 1
    assert fitting(queue, token_limit(most)) == expected
    # The most slices and windows that there can be to a token.
    assert fitting([Size(1, 1, 1)] * (most + 1), token_limit(most)) == most


def test_each_cap_ends_a_batch() -> None:
    largest = Size(100, 10, 20)
    assert fitting([Size(30, 1, 1)] * 20, largest) == 3
    assert fitting([Size(1, 1, 1)] * 20, largest) == 10
    assert fitting([Size(4, 1, 6)] * 20, largest) == 3
    assert fitting([Size(101, 1, 1), Size(1, 1, 1)], largest) == 1
    assert fitting([], largest) == 0


# --- which one holds it -----------------------------------------------------------------------------------------


@given(slices=st.lists(sizes(), min_size=1, max_size=20), most=st.integers(65, 3000))
def test_the_budget_that_is_chosen_is_the_smallest_that_holds_it(slices: list[Size], most: int) -> None:
    load, ascending = total(slices), ladder(most)
    chosen = choose(load, ascending)
    if isinstance(chosen, Eager):
        assert not any(holds(each, load) for each in ascending)
        return
    assert holds(chosen, load)
    smaller = ascending[: ascending.index(chosen)]
    assert not any(holds(each, load) for each in smaller)
    # Of tokens, slices or windows more than half are used, of the one for which the budget below was too small.
    used = (load.tokens / chosen.tokens, load.slices / chosen.slices, load.windows / chosen.windows)
    assert not smaller or max(used) > 0.5
    if not smaller or holds(Size(0, smaller[-1].slices, smaller[-1].windows), Size(0, load.slices, load.windows)):
        assert chosen.tokens - load.tokens < max(64, load.tokens)


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Size(1, 1, 1), Size(64, 2, 8)),
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
def test_budgets_of_200_tokens_and_their_loads(load: Size, expected: Size | Eager) -> None:
    assert choose(load, ladder(200)) == expected


def test_where_nothing_is_captured_nothing_is_chosen() -> None:
    assert choose(Size(1, 1, 0), []) is Eager.NONE_CAPTURED


# --- whether that pays ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "chosen", "expected"),
    [
        (64, 0, True),
        (1, 0, True),  # below the first, a forward without a graph is taken to be as long as the first
        (128, 1, True),
        (96, 1, True),  # 7 ms on the line from 6 to 8, as long as the replay
        (95, 1, False),
        (256, 2, True),
        (255, 2, False),
    ],
)
def test_a_replay_pays_where_it_is_no_longer_than_the_load_without_its_padding(
    tokens: int, chosen: int, expected: bool
) -> None:
    times = zip(ladder(256), [(0.005, 0.006), (0.007, 0.008), (0.020, 0.020)], strict=True)
    measured = [Measured(each, *taken) for each, taken in times]
    assert pays(Size(tokens, 1, 1), measured[chosen].bucket, measured) is expected


@given(tokens=st.integers(1, 256), replay_s=st.floats(0.001, 1), eager_s=st.floats(0.001, 1))
def test_one_budget_pays_for_all_or_for_nothing(tokens: int, replay_s: float, eager_s: float) -> None:
    only = bucket_size(256, 0)
    assert pays(Size(tokens, 1, 0), only, [Measured(only, replay_s, eager_s)]) == (replay_s <= eager_s)
