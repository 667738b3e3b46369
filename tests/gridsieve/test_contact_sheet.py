"""The contact sheet shows kept patches in colour with a border, and pruned ones grey and dark."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from gridsieve.cli.contact_sheet import ACCENT, PAPER, TRACK, contact_sheet, sliced_sheet
from gridsieve.common.contract.plan import Grid

RED = (200, 0, 0)


def red_frames(count: int) -> NDArray[np.uint8]:
    return np.full((count, 56, 84, 3), RED, dtype=np.uint8)


def pixels_of(sheet: Image.Image, colour: tuple[int, int, int]) -> NDArray[np.bool_]:
    return (np.asarray(sheet) == np.array(colour)).all(axis=2)


def draw(grid: Grid, kept: list[int], frames_per_slice: int = 2) -> Image.Image:
    frames = red_frames(grid.t * frames_per_slice)
    stamps = [index / 2 for index in range(len(frames))]
    return contact_sheet(
        frames, grid, np.array(kept, dtype=np.int32), stamps, "clip.mp4", "a caption", frames_per_slice
    )


def test_a_kept_patch_is_drawn_at_the_place_of_its_token() -> None:
    grid = Grid(1, 2, 3)
    whole = draw(grid, list(range(6)), frames_per_slice=1)
    rows, columns = np.nonzero(pixels_of(whole, RED))
    top, left = rows.min() - 1, columns.min() - 1
    cell_height, cell_width = (rows.max() + 2 - top) / 2, (columns.max() + 2 - left) / 3

    one = draw(grid, [5], frames_per_slice=1)  # row 1, column 2
    rows, columns = np.nonzero(pixels_of(one, RED))
    assert (rows.min() - 1 - top) / cell_height == 1
    assert (columns.min() - 1 - left) / cell_width == 2


def test_the_bar_below_a_slice_shows_the_fraction_kept() -> None:
    sheet = draw(Grid(1, 2, 2), [0], frames_per_slice=1)
    bar = np.asarray(sheet)[np.nonzero(pixels_of(sheet, TRACK).any(axis=1))[0].max()]
    accent, track = ((bar == np.array(colour)).all(axis=1).sum() for colour in (ACCENT, TRACK))
    assert accent / (accent + track) == pytest.approx(1 / 4, abs=0.01)


def test_every_slice_has_a_place_on_the_sheet() -> None:
    sheet = draw(Grid(100, 1, 1), [])
    bars = pixels_of(sheet, TRACK)
    starts = bars & ~np.roll(bars, 1, axis=1) & ~np.roll(bars, 1, axis=0)
    assert starts[76:].sum() == 100
    assert (np.asarray(sheet)[:, -1] == PAPER).all()


@pytest.mark.parametrize(
    ("source", "tile", "columns", "rows"),
    [((28, 84), (56, 42), 4, 2), ((42, 42), (42, 42), 1, 2)],
    ids=["wide", "two rows of one"],
)
def test_tiles_are_drawn_in_their_rows_and_columns_behind_the_source(
    source: tuple[int, int], tile: tuple[int, int], columns: int, rows: int
) -> None:
    colours = [(0, 100 + 10 * number, 200) for number in range(columns * rows)]
    tiles = np.array([np.full((*tile, 3), colour) for colour in colours], dtype=np.uint8)
    whole = np.full((*source, 3), RED, dtype=np.uint8)
    sheet = sliced_sheet(whole, tiles, columns, "photo.png", f"source and {columns} by {rows} slices")

    def box(colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
        """Top, left, bottom, right."""
        found = np.nonzero(pixels_of(sheet, colour))
        return int(found[0].min()), int(found[1].min()), int(found[0].max()), int(found[1].max())

    red, boxes = box(RED), [box(colour) for colour in colours]
    for number, (top, left, bottom, right) in enumerate(boxes):
        assert top > red[2] or left > red[3]
        row, column = divmod(number, columns)
        assert top == boxes[row * columns][0]
        assert left == boxes[column][1]
        assert row == 0 or top > boxes[number - columns][2]
        assert column == 0 or left > boxes[number - 1][3]
        # Of the same scale as the source, each with a border of one pixel.
        assert (bottom - top + 3) / (red[2] - red[0] + 3) == pytest.approx(tile[0] / source[0], rel=0.02)
        assert (right - left + 3) / (red[3] - red[1] + 3) == pytest.approx(tile[1] / source[1], rel=0.02)
        assert sheet.getpixel((left - 1, top)) == sheet.getpixel((left, top - 1)) == ACCENT
    assert not pixels_of(sheet, (0, 0, 0)).any()


def test_a_group_of_frames_has_one_border_around_its_frames_and_their_times() -> None:
    kept, times = np.arange(3, dtype=np.int32), [number / 3 for number in range(5)]
    sheet = contact_sheet(red_frames(5), Grid(3, 1, 1), kept, times, "clip.mp4", "", 2, in_groups=True)
    pixels, accent, red = np.asarray(sheet), pixels_of(sheet, ACCENT), pixels_of(sheet, RED)
    accent[:80] = False  # the legend

    def across(row: int) -> str:
        """What a line crosses: | border, r frame."""
        names = [("|" if accent[row, x] else "r" if red[row, x] else "-") for x in range(sheet.width)]
        return "".join(name for name, before in zip(names, ["", *names], strict=False) if name != before)

    found = "".join(line for line, _ in groupby(map(across, range(76, sheet.height))) if "r" in line)
    assert found.count("|") == 6
    assert found.count("|-r-r-|") == 2
    assert found.count("|-r-|") == 1
    # Below the frames of the first group are their times, inside its border.
    (top, *_), (left, *_) = np.nonzero(accent.any(axis=1))[0], np.nonzero(accent.any(axis=0))[0]
    bordered = next(row for row in range(top, sheet.height) if not accent[row, left])
    below = next(row for row in range(top + 9, sheet.height) if not red[row].any())
    assert (pixels[below : bordered - 2, left + 5 : left + 40] != np.array(PAPER)).any()
