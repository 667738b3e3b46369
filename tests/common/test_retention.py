"""The number of tokens that pruning keeps, exactly."""

from __future__ import annotations

import math
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.contract.errors import InvalidRequest
from common.contract.plan import Grid, Modality
from common.contract.retention import Pruning, method_of, retained_count

GRIDS = st.builds(Grid, st.integers(1, 64), st.integers(1, 40), st.integers(1, 40))


@pytest.mark.parametrize(
    ("grid", "rate", "kept"),
    [
        (Grid(100, 2, 5), 0.9, 100),  # in binary floating point 1000 · (1 − 0.9) is 99.99999999999997
        (Grid(100, 2, 5), 0.7, 300),  # and 1000 · (1 − 0.7) is 300.00000000000006
        (Grid(10, 1, 10), 0.99, 10),  # a hundredth is 1, but a slice is the floor
        (Grid(3, 1, 1), 0.5, 1),
        (Grid(7, 3, 3), 0.0, 63),
        (Grid(1, 6, 7), 0.9, 42),
    ],
)
def test_a_rate_is_taken_as_its_shortest_decimal(grid: Grid, rate: float, kept: int) -> None:
    assert retained_count(grid, Pruning(rate)) == kept


@given(GRIDS, st.integers(0, 9999))
def test_counts_are_exact_in_decimal_arithmetic(grid: Grid, ten_thousandths: int) -> None:
    tokens = grid.t * grid.h * grid.w
    share = Decimal(tokens) * (Decimal(10_000 - ten_thousandths) / Decimal(10_000))
    assert retained_count(grid, Pruning(ten_thousandths / 10_000)) == max(grid.h * grid.w, math.floor(share))


def test_images_and_the_method_none_keep_everything() -> None:
    grid = Grid(4, 3, 3)
    assert retained_count(grid, Pruning(0.9), Modality.IMAGE) == 36
    assert retained_count(grid, Pruning(0.9, method="none")) == 36


@pytest.mark.parametrize("rate", [-0.1, 1.0, 1.5, math.nan, math.inf])
def test_rates_outside_their_range_are_refused(rate: float) -> None:
    with pytest.raises(InvalidRequest, match=r"pruning\.rate .* got"):
        Pruning(rate)


def test_unknown_methods_and_negative_seeds_are_refused() -> None:
    with pytest.raises(InvalidRequest, match=r"'best'.*evs, vidcom2, random, none"):
        Pruning(0.5, method="best")
    with pytest.raises(InvalidRequest, match=r"pruning\.seed"):
        Pruning(0.5, method="random", seed=-1)


@pytest.mark.parametrize(
    ("pruning", "modality", "method"),
    [
        (Pruning(0.5, "vidcom2"), Modality.VIDEO, "vidcom2"),
        (Pruning(0.5, "none"), Modality.VIDEO, "none"),
        (Pruning(0.0, "vidcom2"), Modality.VIDEO, "none"),
        (Pruning(0.5, "vidcom2"), Modality.IMAGE, "none"),
    ],
)
def test_images_and_rate_0_count_as_the_method_none(pruning: Pruning, modality: Modality, method: str) -> None:
    assert method_of(pruning, modality) == method
