"""Pictures as MiniCPM-V sends them: as a whole, and above a number of pixels as slices of their own resolution, too.

    2000 × 1000, of slices of about 448 × 448     the whole, shrunk to 616 × 308, and 4 × 2 slices
                                                  of which each shows its part of the picture in more detail

The number of slices follows from the picture's pixels, their grid is the one whose shape is nearest to its own.
Sources: LLaVA-UHD, arXiv 2403.11703; the published processors of MiniCPM-V 2.5 to 4.5, and `MiniCPMV4_6ImageProcessor`
of transformers 5.24, formula for formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gridsieve.common.contract.plan import FrameShape, SizePx
from gridsieve.families.parts.tiled_images import tile_views
from gridsieve.services.preprocessing.video.resize import View, check_aspect


@dataclass(frozen=True, slots=True)
class Sliced:
    """How a picture is sent. source: its size as a whole. tile: that of each slice, of which there are rows × columns;
    1 × 1: none, the whole alone."""

    source: SizePx
    tile: SizePx
    rows: int = 1
    columns: int = 1

    @property
    def slices(self) -> int:
        """How many there are besides the whole."""
        count = self.rows * self.columns
        return count if count > 1 else 0

    @property
    def frames(self) -> FrameShape:
        """The whole, then the slices, row by row."""
        if not self.slices:
            return FrameShape(1, self.source)
        tile = self.tile if self.tile != self.source else None
        return FrameShape(1 + self.slices, self.source, tile, tile_columns=self.columns)

    @property
    def views(self) -> tuple[View | None, ...]:
        """What each of the frames shows."""
        return (None, *tile_views(self.rows, self.columns, self.tile)) if self.slices else (None,)


@dataclass(frozen=True, slots=True)
class Slicing:
    """scale_px: side of a square with as many pixels as a slice has. max_slices: of a picture; 1: it has none. unit_px:
    all sides are multiples of it."""

    scale_px: int
    max_slices: int
    unit_px: int

    def of(self, height_px: int, width_px: int, max_pixels: int | None = None) -> Sliced:
        """How a picture of this size is sent; of more than `max_pixels` it is shrunk before.

        Raises MediaRejected for an aspect ratio above 200.
        """
        check_aspect(height_px, width_px)
        if max_pixels is not None and height_px * width_px > max_pixels:
            shrink = math.sqrt(max_pixels / (height_px * width_px))
            height_px, width_px = max(1, int(height_px * shrink)), max(1, int(width_px * shrink))
        columns, rows = self._grid(height_px, width_px)
        if columns * rows == 1:
            source = self._sides(height_px, width_px, grows=True)
            return Sliced(source, source)
        source = self._sides(height_px, width_px, grows=False)
        height, width = _multiple(height_px, rows), _multiple(width_px, columns)
        return Sliced(source, self._sides(height / rows, width / columns, grows=True), rows, columns)

    def _grid(self, height_px: int, width_px: int) -> tuple[int, int]:
        """Columns and rows: of about as many slices as its pixels need, the grid whose shape is nearest to its own."""
        wanted = min(math.ceil(width_px * height_px / self.scale_px**2), self.max_slices)
        if wanted <= 1:
            return 1, 1
        shape, best, best_error = math.log(width_px / height_px), (1, 1), math.inf
        for count in (wanted - 1, wanted, wanted + 1):
            if count == 1 or count > self.max_slices:
                continue
            for columns in range(1, count + 1):
                error = abs(shape - math.log(columns / (count // columns)))
                if count % columns == 0 and error < best_error:
                    best, best_error = (columns, count // columns), error
        return best

    def _sides(self, height_px: float, width_px: float, *, grows: bool) -> SizePx:
        """Height and width of a picture of about this shape.

        It has as many pixels as a slice if it has more, or `grows`.
        """
        if grows or width_px * height_px > self.scale_px**2:
            ratio = width_px / height_px
            height_px = int(self.scale_px / math.sqrt(ratio))
            width_px = int(height_px * ratio)
        return _multiple(height_px, self.unit_px), _multiple(width_px, self.unit_px)


def _multiple(length: float, unit: int) -> int:
    return max(round(length / unit) * unit, unit)
