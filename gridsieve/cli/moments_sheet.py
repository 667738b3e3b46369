"""Draws moments of films: a frame of each in rows, over its file, its seconds and its score.

    text
    [frame]        [frame]        [frame]
    a.mp4          b.mp4          a.mp4
    12.0 to 15.5 s 0.0 to 4.2 s   40.1 to 44.0 s
    0.412          0.377          0.301

It knows neither files nor how moments are found.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence

from PIL import Image, ImageDraw, ImageFont

from gridsieve.cli.contact_sheet import (
    FAINT_INK,
    INK,
    MARGIN_PX,
    PAPER,
    ROW_GAP_PX,
    SLICE_GAP_PX,
    TEXT_SIZE,
    TITLE_SIZE,
)
from gridsieve.search.films import FilmMoment

_COLUMNS = 4
_LINE_PX = 20
_HEADER_PX = 56
_FOOT_PX = 3 * _LINE_PX + 8


def moments_sheet(pictures: Sequence[bytes], moments: Sequence[FilmMoment], title: str) -> Image.Image:
    """pictures: of each moment a frame, JPEG, all of one width, or empty."""
    frames = [Image.open(io.BytesIO(each)) if each else Image.new("RGB", (1, 1), PAPER) for each in pictures]
    width = max((each.width for each in frames), default=0)
    height = max((each.height for each in frames), default=0)
    columns, rows = min(_COLUMNS, max(1, len(frames))), math.ceil(len(frames) / _COLUMNS)
    step_x, step_y = width + SLICE_GAP_PX, height + _FOOT_PX + ROW_GAP_PX
    title_font, font = ImageFont.load_default(TITLE_SIZE), ImageFont.load_default(TEXT_SIZE)
    widest = max(columns * step_x - SLICE_GAP_PX, math.ceil(title_font.getlength(title)))
    sheet = Image.new("RGB", (2 * MARGIN_PX + widest, 2 * MARGIN_PX + _HEADER_PX + rows * step_y), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((MARGIN_PX, MARGIN_PX), title, INK, title_font)
    for number, (frame, moment) in enumerate(zip(frames, moments, strict=True)):
        row, column = divmod(number, _COLUMNS)
        x, y = MARGIN_PX + column * step_x, MARGIN_PX + _HEADER_PX + row * step_y
        sheet.paste(frame, (x, y))
        y += height + 8
        lines = (moment.path, f"{moment.start_s:.1f} to {moment.end_s:.1f} s", f"{moment.score or 0:.3f}")
        for line, text in enumerate(lines):
            draw.text((x, y + line * _LINE_PX), _fitted(text, font, width), FAINT_INK if line else INK, font)
    return sheet


def _fitted(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width_px: int) -> str:
    """The end of a text, as much as fits."""
    if font.getlength(text) <= width_px:
        return text
    first = next(place for place in range(len(text)) if font.getlength(f"...{text[place:]}") <= width_px)
    return f"...{text[first:]}"
