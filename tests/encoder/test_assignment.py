"""Assignment of slices to ranks: each slice once, true loads, and Graham's bound on the largest load."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.encoder.tower.parallel.assignment import assign


@pytest.mark.parametrize(
    ("costs", "ranks", "order", "counts", "loads"),
    [
        ([1000, 100, 200, 50], 2, [0, 2, 1, 3], [1, 3], [1000, 350]),
        ([100, 200], 4, [1, 0], [1, 1, 0, 0], [200, 100, 0, 0]),
        ([], 3, [], [0, 0, 0], [0, 0, 0]),
        ([5, 5, 5, 5], 2, [0, 2, 1, 3], [2, 2], [10, 10]),  # ties: the earlier slice, the lower rank
        ([3, 3, 2, 2, 2], 2, [0, 2, 4, 1, 3], [3, 2], [7, 5]),  # the best is 6 and 6
    ],
)
def test_the_costliest_slice_goes_first_to_the_rank_with_the_least_load(
    costs: list[int], ranks: int, order: list[int], counts: list[int], loads: list[int]
) -> None:
    assert assign(costs, ranks) == (order, counts, loads)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 60) | st.sampled_from([7, 7]), max_size=7), st.integers(1, 3))
def test_each_slice_is_assigned_once_and_the_largest_load_is_within_the_bound(costs: list[int], ranks: int) -> None:
    found = assign(costs, ranks)
    assert sorted(each for share in found.shares for each in share) == list(range(len(costs)))
    assert [each for share in found.shares for each in share] == found.order
    assert [sum(costs[each] for each in share) for share in found.shares] == found.loads
    best = min(
        max(sum(cost for cost, rank in zip(costs, way, strict=True) if rank == each) for each in range(ranks))
        for way in product(range(ranks), repeat=len(costs))
    )
    # Graham's bound, exactly: 4/3 − 1/(3 · ranks).
    assert 3 * ranks * max(found.loads) <= (4 * ranks - 1) * best
