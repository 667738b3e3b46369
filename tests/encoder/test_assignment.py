"""Assignment of slices to ranks: each slice once, true loads, and Graham's bound on the largest load."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from gridsieve.services.encoder.tower.parallel.assignment import assign


def test_the_costliest_slice_goes_first_to_the_rank_with_the_least_load() -> None:
    assert assign([1000, 100, 200, 50], 2) == [[0], [1, 2, 3]]
    assert assign([100, 200], 3) == [[1], [0], []]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 60) | st.just(7), max_size=6), st.integers(1, 3))
def test_each_slice_is_assigned_once_and_the_largest_load_is_within_the_bound(costs: list[int], ranks: int) -> None:
    shares = assign(costs, ranks)
    assert sorted(each for share in shares for each in share) == list(range(len(costs)))
    best = min(
        max(sum(cost for cost, rank in zip(costs, way, strict=True) if rank == each) for each in range(ranks))
        for way in product(range(ranks), repeat=len(costs))
    )
    # Graham's bound, exactly: 4/3 − 1/(3 · ranks).
    largest = max(sum(costs[each] for each in share) for share in shares)
    assert 3 * ranks * largest <= (4 * ranks - 1) * best
