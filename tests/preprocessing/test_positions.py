"""Positions follow the formula by hand. In test_plans, plans of real media have the positions of transformers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from gridsieve.common.contract.errors import PromptTooLong
from gridsieve.common.contract.plan import MAX_POSITION, Grid
from gridsieve.services.preprocessing.prompt.positions import GridSpan, TextSpan, positions_of


# Two frames a slice: at f frames a second a slice lasts 2 / f seconds, and takes tokens_per_second · 2 / f positions.
@pytest.mark.parametrize(
    ("sampled_fps", "tokens_per_second", "times"),
    [
        (Fraction(2), 2, [0, 2, 4, 6, 8]),
        (Fraction(1), 25, [0, 50, 100, 150, 200]),
        (Fraction(4), 25, [0, 12, 25, 37, 50]),
        (Fraction(24000, 1001), 25, [0, 2, 4, 6, 8]),  # 2.0854 a slice
        (Fraction(24000, 1001), 2, [0, 0, 0, 0, 0]),  # 0.1668 a slice
    ],
)
def test_slices_are_placed_by_their_time(sampled_fps: Fraction, tokens_per_second: int, times: list[int]) -> None:
    step = 2 / sampled_fps * tokens_per_second
    positions = positions_of([TextSpan(300), GridSpan(Grid(5, 2, 3), step), TextSpan(2)])
    expected = [[300 + time, 300 + row, 300 + column] for time in times for row in range(2) for column in range(3)]
    assert positions[:, 300:330].T.tolist() == expected
    after = 300 + max(*times, 1, 2) + 1  # the maximum over all axes, plus 1
    assert positions[:, 330:].tolist() == [[after, after + 1]] * 3


def test_products_that_floats_would_put_below_an_integer_are_exact() -> None:
    # 87 frames at 10 a second, of which 8 are sampled, at 2 tokens a second: 2 · 87 / (8 · 10) · 2 = 4.35 a slice.
    step = Fraction(2 * 87, 8 * 10) * 2
    exact = positions_of([GridSpan(Grid(101, 1, 1), step)])[0].tolist()
    assert exact == [435 * index // 100 for index in range(101)]
    assert int(4.35 * 100) == 434 < exact[100]


def test_positions_beyond_the_limit_are_refused() -> None:
    """A week each at two positions a second: an int32 holds the positions of 1,771 of them, and an answer."""
    week = GridSpan(Grid(2, 1, 1), Fraction(2 * 7 * 24 * 3600))
    assert positions_of([week] * 1771).max() == 1771 * (week.time_step + 1) - 1
    with pytest.raises(PromptTooLong, match=f"at most {MAX_POSITION}"):
        positions_of([week] * 1772)
