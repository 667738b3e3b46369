"""Draws which tokens pruning keeps: all sampled frames, with pruned patches dimmed and kept patches outlined.

    title                                            ▣ kept  ▢ pruned
    caption
    [frame|frame]  [frame|frame]  [frame|frame]      frames of one temporal slice are adjacent:
     0.0 s  0.5 s   1.0 s  1.5 s   2.0 s  2.5 s      they share their tokens
    ━━━━━━━━━━━━━  ━━━───────────  ━────────────      the bar is the fraction of the slice that is kept

With the weights of an answer's attention, kept tokens are dimmed, too: only those with the greatest weight have their
full colours, and a bar is the share of the slice in the attention on the video. Slices that are groups of frames have a
border around their frames and times instead of a bar. An image that is sent as a whole and its tiles has a sheet of its
own:

    source        3 by 2 slices
    [       ]     [     ][     ][     ]
    [       ]     [     ][     ][     ]              all at one scale; the slices below where that is the better shape

It knows nothing of gRPC, files or pruning methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from gridsieve.common.contract.plan import Grid, Int32Array

RGB = tuple[int, int, int]

PAPER: RGB = (16, 18, 23)
INK: RGB = (232, 234, 238)
FAINT_INK: RGB = (138, 144, 156)
TRACK: RGB = (45, 49, 58)
ACCENT: RGB = (255, 184, 77)

# Pruned patches are drawn in grey, at this share of their brightness.
DIMMED_SHARE = 0.32

SHEET_WIDTH_PX = 1560
SHEET_ASPECT = 1.5
MIN_FRAME_WIDTH_PX = 96
MAX_FRAME_WIDTH_PX = 300

# Of an image and its tiles: the longest side of both together.
MAX_PICTURES_PX = 900

MARGIN_PX = 28
HEADER_PX = 76
FRAME_GAP_PX = 2
BORDER_PX = 5
SLICE_GAP_PX = 18
ROW_GAP_PX = 20
FOOT_PX = 30
TITLE_SIZE, TEXT_SIZE, STAMP_SIZE = 24, 15, 13


@dataclass(frozen=True, slots=True)
class _Layout:
    """Sizes in pixels of a cell (one token), frame, slice and sheet, and the number of slices in a row."""

    grid: Grid
    slice_frames: int
    cell_width: int
    cell_height: int
    columns: int

    @property
    def frame_size(self) -> tuple[int, int]:
        return self.grid.w * self.cell_width, self.grid.h * self.cell_height

    @property
    def slice_width(self) -> int:
        return self.slice_frames * (self.frame_size[0] + FRAME_GAP_PX) - FRAME_GAP_PX

    @property
    def sheet_size(self) -> tuple[int, int]:
        rows = math.ceil(self.grid.t / self.columns)
        width = 2 * MARGIN_PX + self.columns * (self.slice_width + SLICE_GAP_PX) - SLICE_GAP_PX
        height = HEADER_PX + MARGIN_PX + rows * (self.frame_size[1] + FOOT_PX + ROW_GAP_PX)
        return width, height

    def corner(self, index: int) -> tuple[int, int]:
        """The top left corner of slice `index`."""
        row, column = divmod(index, self.columns)
        return (
            MARGIN_PX + column * (self.slice_width + SLICE_GAP_PX),
            HEADER_PX + MARGIN_PX + row * (self.frame_size[1] + FOOT_PX + ROW_GAP_PX),
        )


def contact_sheet(
    frames: NDArray[np.uint8],
    grid: Grid,
    kept: Int32Array,
    timestamps_s: Sequence[float],
    title: str,
    caption: str,
    slice_frames: int,
    in_groups: bool = False,
    weights: NDArray[np.float32] | None = None,
) -> Image.Image:
    """All frames, with pruned tokens dimmed and kept tokens outlined.

    frames: uint8 [F, height, width, 3], RGB.
    kept: int32 [K], indices of the kept tokens in the grid.
    timestamps_s: one per frame, or empty.
    slice_frames: of each temporal slice; the last slice may have fewer.
    in_groups: all tokens are kept and belong to the slice, not to its frames: it has a border, and its frames none.
    weights: float32 [t, h, w], of an answer's attention on each token; None: only what is kept is drawn.
    """
    flat = np.zeros(grid.tokens, dtype=bool)
    flat[kept] = True
    mask = flat.reshape(grid.t, grid.h, grid.w)
    light = mask.astype(np.float32) if weights is None else _light(weights)
    bars = mask.mean(axis=(1, 2)) if weights is None else weights.sum(axis=(1, 2)) / weights.sum()

    layout = _lay_out(frames, slice_frames, grid)
    frame_width, frame_height = layout.frame_size
    sheet, draw = _sheet(*layout.sheet_size, title, caption)
    for index in range(grid.t):
        left, top = layout.corner(index)
        foot = top + frame_height
        first = index * slice_frames
        shown = frames[first : first + slice_frames]
        for offset, pixels in enumerate(shown):
            x = left + offset * (frame_width + FRAME_GAP_PX)
            drawn = _frame(pixels, mask[index], light[index], layout, is_outlined=not in_groups)
            sheet.paste(drawn, (x, top))
            if timestamps_s:
                draw.text((x, foot + 6), f"{timestamps_s[first + offset]:.2f} s", FAINT_INK, _font(STAMP_SIZE))
        if in_groups:
            right = left + len(shown) * (frame_width + FRAME_GAP_PX) - FRAME_GAP_PX
            box = (left - BORDER_PX, top - BORDER_PX, right + BORDER_PX - 1, foot + FOOT_PX - 1)
            draw.rectangle(box, outline=ACCENT, width=2)
        else:
            _draw_bar(draw, left, foot, layout.slice_width, float(bars[index]))
    return sheet


def sliced_sheet(
    source: NDArray[np.uint8], tiles: NDArray[np.uint8], columns: int, title: str, caption: str
) -> Image.Image:
    """The whole picture, then its tiles in rows and columns, all at one scale and each with a border.

    source: uint8 [height, width, 3], RGB. tiles: uint8 [rows · columns, height, width, 3], row by row.
    """
    rows, (height, width) = len(tiles) // columns, tiles.shape[1:3]
    beside = source.shape[1] + columns * width, max(source.shape[0], rows * height)
    below = max(source.shape[1], columns * width), source.shape[0] + rows * height
    shape = min((beside, below), key=_ugliness)
    scale = MAX_PICTURES_PX / max(shape)
    whole, *drawn = (_bordered(pixels, scale) for pixels in (source, *tiles))
    step_x, step_y = drawn[0].width + FRAME_GAP_PX, drawn[0].height + FRAME_GAP_PX
    block = Image.new("RGB", (columns * step_x - FRAME_GAP_PX, rows * step_y - FRAME_GAP_PX), PAPER)
    for index, tile in enumerate(drawn):
        block.paste(tile, (index % columns * step_x, index // columns * step_y))

    left, top = MARGIN_PX, HEADER_PX + MARGIN_PX
    if shape == below:
        corner = left, top + FOOT_PX + whole.height + SLICE_GAP_PX
    else:
        corner = left + whole.width + SLICE_GAP_PX, top
    right = max(left + whole.width, corner[0] + block.width)
    bottom = FOOT_PX + max(top + whole.height, corner[1] + block.height)
    sheet, draw = _sheet(right + MARGIN_PX, bottom + MARGIN_PX, title, caption)
    blocks = (((left, top), "source", whole), (corner, f"{columns} by {rows} slices", block))
    for (x, y), label, picture in blocks:
        draw.text((x, y), label, FAINT_INK, _font(TEXT_SIZE))
        sheet.paste(picture, (x, y + FOOT_PX))
    return sheet


def _bordered(pixels: NDArray[np.uint8], scale: float) -> Image.Image:
    """With the border of what is kept."""
    height, width = pixels.shape[:2]
    picture = _resized(pixels, (max(3, round(width * scale)), max(3, round(height * scale))))
    ImageDraw.Draw(picture).rectangle((0, 0, picture.width - 1, picture.height - 1), outline=ACCENT)
    return picture


def side_by_side(sheets: Sequence[Image.Image]) -> Image.Image:
    """One picture of several sheets, in rows of as many as there are rows, or one more."""
    columns = math.ceil(math.sqrt(len(sheets)))
    width, height = max(sheet.width for sheet in sheets), max(sheet.height for sheet in sheets)
    joined = Image.new("RGB", (columns * width, -(-len(sheets) // columns) * height), PAPER)
    for index, sheet in enumerate(sheets):
        joined.paste(sheet, (index % columns * width, index // columns * height))
    return joined


def _lay_out(frames: NDArray[np.uint8], slice_frames: int, grid: Grid) -> _Layout:
    """Chooses the number of slices in a row: close to SHEET_ASPECT, with few empty places in the last row."""
    layouts = [_with_columns(frames, slice_frames, grid, columns) for columns in range(1, grid.t + 1)]

    return min(layouts, key=lambda each: _ugliness(each.sheet_size) + -grid.t % each.columns / grid.t)


def _ugliness(size: tuple[int, int]) -> float:
    """How far from SHEET_ASPECT."""
    return abs(math.log(size[0] / size[1] / SHEET_ASPECT))


def _with_columns(frames: NDArray[np.uint8], slice_frames: int, grid: Grid, columns: int) -> _Layout:
    """The largest frames with `columns` slices in a row; each token covers a whole number of pixels."""
    height, width = frames.shape[1:3]
    slice_width = (SHEET_WIDTH_PX - 2 * MARGIN_PX + SLICE_GAP_PX) / columns - SLICE_GAP_PX
    frame_width = min(max(slice_width / slice_frames - FRAME_GAP_PX, MIN_FRAME_WIDTH_PX), MAX_FRAME_WIDTH_PX)
    cell_width = max(2, int(frame_width / grid.w))
    cell_height = max(2, round(cell_width * (height / grid.h) / (width / grid.w)))
    return _Layout(grid, slice_frames, cell_width, cell_height, columns)


def _light(weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """How much of its colour each token has, 0 to 1: the square root of its weight's share of the greatest."""
    light: NDArray[np.float32] = np.sqrt(weights / weights.max())
    return light


def _frame(
    pixels: NDArray[np.uint8],
    mask: NDArray[np.bool_],
    light: NDArray[np.float32],
    layout: _Layout,
    *,
    is_outlined: bool,
) -> Image.Image:
    """mask, light: [h, w], of the tokens of the grid."""
    resized = np.asarray(_resized(pixels, layout.frame_size), dtype=np.float32)
    kept = mask.repeat(layout.cell_height, axis=0).repeat(layout.cell_width, axis=1)
    shown = light.repeat(layout.cell_height, axis=0).repeat(layout.cell_width, axis=1)
    grey = resized.mean(axis=2, keepdims=True)
    dimmed = grey * DIMMED_SHARE + np.array(PAPER, dtype=np.float32) * (1 - DIMMED_SHARE)
    drawn = dimmed + (resized - dimmed) * shown[..., None]
    if is_outlined:
        drawn[_outline(kept)] = ACCENT
    return Image.fromarray(drawn.round().astype(np.uint8))


def _resized(pixels: NDArray[np.uint8], size: tuple[int, int]) -> Image.Image:
    return Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)


def _outline(kept: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """The kept pixels next to a pruned pixel or the frame's edge."""
    padded = np.pad(kept, 1)
    inside = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    return kept & ~inside


def _sheet(width: int, height: int, title: str, caption: str) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    """A sheet with its header, wider where that needs it."""
    legend_px = 190
    texts = _font(TITLE_SIZE).getlength(title), _font(TEXT_SIZE).getlength(caption) + legend_px
    width = max(width, 2 * MARGIN_PX + round(max(texts)))
    sheet = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN_PX, MARGIN_PX - 2), title, INK, _font(TITLE_SIZE))
    draw.text((MARGIN_PX, MARGIN_PX + 34), caption, FAINT_INK, _font(TEXT_SIZE))
    x = width - MARGIN_PX
    for label, fill, outline in (("pruned", TRACK, TRACK), ("kept", (214, 120, 92), ACCENT)):
        x -= round(draw.textlength(label, _font(TEXT_SIZE)))
        draw.text((x, MARGIN_PX + 34), label, FAINT_INK, _font(TEXT_SIZE))
        x -= 22
        draw.rectangle((x, MARGIN_PX + 36, x + 13, MARGIN_PX + 49), fill, outline)
        x -= 20
    return sheet, draw


def _draw_bar(draw: ImageDraw.ImageDraw, x: int, y: int, width: int, share: float) -> None:
    y += FOOT_PX - 4
    draw.rectangle((x, y, x + width - 1, y + 2), TRACK)
    if share:
        draw.rectangle((x, y, x + max(1, round(width * share)) - 1, y + 2), ACCENT)


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)
