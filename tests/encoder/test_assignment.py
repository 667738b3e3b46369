"""Slices shared out to ranks: each once, the loads true, and never far from the best of all ways."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.encoder.tower.parallel.assignment import assign

COSTS = st.lists(st.integers(0, 1000) | st.sampled_from([7, 7, 100]), max_size=40)


@pytest.mark.parametrize(
    ("costs", "ranks", "order", "counts", "loads"),
    [
        ([1000, 100, 200, 50], 2, [0, 2, 1, 3], [1, 3], [1000, 350]),
        ([100, 200], 4, [1, 0], [1, 1, 0, 0], [200, 100, 0, 0]),
        ([], 3, [], [0, 0, 0], [0, 0, 0]),
        ([9], 1, [0], [1], [9]),
        ([5, 5, 5, 5], 2, [0, 2, 1, 3], [2, 2], [10, 10]),  # ties: the earlier slice, the lower rank
        ([3, 3, 2, 2, 2], 2, [0, 2, 4, 1, 3], [3, 2], [7, 5]),  # the best is 6 and 6
    ],
)
def test_the_costliest_goes_first_to_whoever_has_the_least(
    costs: list[int], ranks: int, order: list[int], counts: list[int], loads: list[int]
) -> None:
    assert assign(costs, ranks) == (order, counts, loads)


@given(COSTS, st.integers(1, 9))
def test_every_slice_is_somebodys_once_and_loads_are_what_they_cost(costs: list[int], ranks: int) -> None:
    found = assign(costs, ranks)
    assert sorted(found.order) == list(range(len(costs)))
    assert [len(share) for share in found.shares] == found.counts
    assert [each for share in found.shares for each in share] == found.order
    assert [sum(costs[each] for each in share) for share in found.shares] == found.loads
    assert len(found.loads) == ranks


@given(COSTS, st.integers(1, 9))
def test_each_slice_went_to_whoever_had_the_least_when_its_turn_came(costs: list[int], ranks: int) -> None:
    rank_of = {each: rank for rank, share in enumerate(assign(costs, ranks).shares) for each in share}
    loads = [0] * ranks
    for each in sorted(range(len(costs)), key=lambda each: (-costs[each], each)):
        assert rank_of[each] == loads.index(min(loads))
        loads[rank_of[each]] += costs[each]


@given(st.lists(st.integers(0, 60), max_size=7), st.integers(1, 3))
def test_the_most_of_a_rank_is_within_a_third_of_the_best(costs: list[int], ranks: int) -> None:
    ways = product(range(ranks), repeat=len(costs))
    best = min(
        max(sum(cost for cost, rank in zip(costs, way, strict=True) if rank == each) for each in range(ranks))
        for way in ways
    )
    # Graham's bound, exactly: 4/3 − 1/(3 · ranks).
    assert 3 * ranks * max(assign(costs, ranks).loads) <= (4 * ranks - 1) * best
