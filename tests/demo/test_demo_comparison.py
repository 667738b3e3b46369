"""The comparison of pruning methods: equal tokens, intervals, the paired test."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.comparison import Answered, Cell, paired_p, wilson
from demo.evaluate import GRID, RATES, pruning_at
from gridsieve.common.contract.retention import METHODS, NONE, num_kept


@pytest.mark.parametrize("rate", [*RATES, 0.0, 0.33])
def test_all_methods_keep_as_many_tokens_as_evs_or_the_fewest_that_they_can(rate: float) -> None:
    slice_tokens = GRID.h * GRID.w
    budget = max(slice_tokens, math.floor(GRID.t * slice_tokens * (1 - rate) + 1e-9))
    for method in set(METHODS) - {NONE}:
        kept = num_kept(GRID, pruning_at(rate, method))
        if method == "evs_causal":
            each = max(1, (budget - slice_tokens) // (GRID.t - 1))
            assert kept == slice_tokens + (GRID.t - 1) * each
        else:
            assert kept == budget


@given(st.integers(1, 3000), st.data())
def test_the_ends_of_the_interval_are_shares_that_differ_by_196_standard_errors(
    asked: int, data: st.DataObject
) -> None:
    share = data.draw(st.integers(0, asked)) / asked
    for end in wilson(share, asked):
        assert (share - end) ** 2 == pytest.approx(1.96**2 * end * (1 - end) / asked, abs=1e-12)


def cell(rights: list[list[bool]]) -> Cell:
    """The answers about clips."""
    answers = [
        Answered(seed, "still", f"{i}", 64, right) for seed, clip in enumerate(rights) for i, right in enumerate(clip)
    ]
    return Cell(0.5, "evs", tuple(answers))


def test_the_paired_test_is_that_over_all_signs_of_the_differences_of_clips() -> None:
    better = [[True, True], [True, False], [True, True], [False, True], [True, True], [True, True]]
    worse = [[True, False], [False, False], [True, False], [True, True], [False, False], [True, True]]
    differences = [sum(one) - sum(other) for one, other in zip(better, worse, strict=True)]
    totals = [
        sum(sign * each for sign, each in zip(signs, differences, strict=True)) for signs in product((-1, 1), repeat=6)
    ]
    exact = sum(abs(total) >= abs(sum(differences)) for total in totals) / len(totals)
    assert paired_p(cell(better), cell(worse)) == pytest.approx(exact, abs=0.02)
    assert paired_p(cell(better), cell(better)) == 1
    with pytest.raises(ValueError, match="the same questions"):
        paired_p(cell(better), Cell(0.5, "evs", cell(worse).answers[::-1]))
