"""Positions at the rates that clips have, written down by hand from the formula, far beyond bf16's exact integers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from common.contract.plan import Grid
from services.preprocessing.prompt.positions import GridSpan, TextSpan, positions_of


# Two frames a slice: at f frames a second a slice lasts 2 / f seconds, and takes tokens_per_second · 2 / f positions.
@pytest.mark.parametrize(
    ("sampled_fps", "tokens_per_second", "times"),
    [
        (Fraction(1), 2, [0, 4, 8, 12, 16]),
        (Fraction(2), 2, [0, 2, 4, 6, 8]),
        (Fraction(4), 2, [0, 1, 2, 3, 4]),
        (Fraction(1), 25, [0, 50, 100, 150, 200]),
        (Fraction(4), 25, [0, 12, 25, 37, 50]),
        (Fraction(24000, 1001), 25, [0, 2, 4, 6, 8]),  # 2.0854 a slice
        (Fraction(24000, 1001), 2, [0, 0, 0, 0, 0]),  # 0.1668 a slice
    ],
)
def test_slices_stand_where_their_time_says(sampled_fps: Fraction, tokens_per_second: int, times: list[int]) -> None:
    step = 2 / sampled_fps * tokens_per_second
    positions = positions_of([TextSpan(7), GridSpan(Grid(5, 2, 3), step), TextSpan(2)])
    expected = [[7 + time, 7 + row, 7 + column] for time in times for row in range(2) for column in range(3)]
    assert positions[:, 7:37].T.tolist() == expected
    after = 7 + max(*times, 1, 2) + 1  # the maximum over all axes, plus 1
    assert positions[:, 37:].tolist() == [[after, after + 1]] * 3


def test_slice_24_at_23_976_frames_a_second_has_just_passed_the_integer() -> None:
    # 24 · 2.0854166… = 50.05; in steps of 1001/480 exactly.
    positions = positions_of([GridSpan(Grid(481, 1, 1), Fraction(1001, 480))])
    assert positions[0, 24] == 50
    assert positions[0, 479] == 998
    assert positions[0, 480] == 1001  # 480 · 1001/480: the last product is a whole number, and floors to itself


def test_products_that_floating_point_puts_below_the_integer_do_not_floor_lower() -> None:
    # 87 frames at 10 a second, of which 8 are sampled, at 2 tokens a second: 2 · 87 / (8 · 10) · 2 = 4.35 a slice.
    step = Fraction(2 * 87, 8 * 10) * 2
    exact = positions_of([GridSpan(Grid(101, 1, 1), step)])[0].tolist()
    assert exact == [435 * index // 100 for index in range(101)]
    assert exact[100] == 435
    assert int(4.35 * 100) == 434


def test_positions_beyond_256_and_2048_are_exact() -> None:
    # One slice each 4 seconds at 25 tokens a second: 100 positions.
    positions = positions_of([TextSpan(300), GridSpan(Grid(40, 1, 2), Fraction(100)), TextSpan(1)])
    assert positions[0, 300:380:2].tolist() == [300 + 100 * index for index in range(40)]
    assert positions[1, 300:380].tolist() == [300] * 80
    assert positions[2, 300:380].tolist() == [300, 301] * 40
    assert positions[:, 380].tolist() == [300 + 3900 + 1] * 3


def test_an_image_has_no_time_and_text_follows_its_longer_side() -> None:
    positions = positions_of([TextSpan(3), GridSpan(Grid(1, 2, 4), Fraction(0)), TextSpan(1)])
    assert positions[0].tolist() == [0, 1, 2, *[3] * 8, 7]
    assert positions[1].tolist() == [0, 1, 2, *[3] * 4, *[4] * 4, 7]
    assert positions[2].tolist() == [0, 1, 2, 3, 4, 5, 6, 3, 4, 5, 6, 7]


def test_slices_that_stand_alone_follow_each_other_by_their_longer_side() -> None:
    one = GridSpan(Grid(1, 2, 3), Fraction(0))
    positions = positions_of([TextSpan(3), one, TextSpan(2), one, TextSpan(1)])
    assert positions[0].tolist() == [0, 1, 2, *[3] * 6, 6, 7, *[8] * 6, 11]
    assert positions[1].tolist() == [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 8, 8, 9, 9, 9, 11]
    assert positions[2].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 10, 8, 9, 10, 11]
