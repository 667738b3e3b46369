"""The number of tokens that pruning keeps, exactly."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Grid, Modality
from gridsieve.common.contract.retention import METHODS, ItemPruning, num_kept

GRIDS = st.builds(Grid, st.integers(1, 64), st.integers(1, 40), st.integers(1, 40))


@given(GRIDS, st.integers(0, 9999), st.sampled_from(METHODS), st.sampled_from(Modality))
@example(Grid(100, 2, 5), 9000, "evs", Modality.VIDEO)  # in binary floating point 1000 · (1 − 0.9) is 99.99999999999997
@example(Grid(100, 2, 5), 9990, "evs", Modality.VIDEO)  # the floor is a slice
@example(Grid(100, 2, 5), 9990, "evs_causal", Modality.VIDEO)  # the floor is a token of each other slice
def test_counts_are_exact_in_decimal_arithmetic_above_the_floor_of_each_method(
    grid: Grid, ten_thousandths: int, method: str, modality: Modality
) -> None:
    tokens = grid.t * grid.h * grid.w
    share = Decimal(tokens) * (Decimal(10_000 - ten_thousandths) / Decimal(10_000))
    expected = max(grid.t if method in ("vidcom2", "vcast") else grid.h * grid.w, math.floor(share))
    if method == "evs_causal":
        each = Decimal(grid.h * grid.w) * (Decimal(10_000 - ten_thousandths) / Decimal(10_000))
        expected = grid.h * grid.w + (grid.t - 1) * max(1, math.floor(each))
    if modality is not Modality.VIDEO or method == "none":
        expected = tokens
    assert num_kept(grid, ItemPruning(ten_thousandths / 10_000, method), modality) == expected


@pytest.mark.parametrize("rate", [-0.1, 1.0, math.nan, math.inf])
def test_rates_outside_their_range_are_refused(rate: float) -> None:
    with pytest.raises(InvalidRequest, match=r"pruning\.rate .* got"):
        ItemPruning(rate)


def test_unknown_methods_and_negative_seeds_are_refused() -> None:
    with pytest.raises(
        InvalidRequest, match=r"evs, evs_causal, vidcom2, vcast, random, pixel_change, none, got 'best'"
    ):
        ItemPruning(0.5, method="best")
    with pytest.raises(InvalidRequest, match=r"pruning\.seed"):
        ItemPruning(0.5, method="random", seed=-1)
