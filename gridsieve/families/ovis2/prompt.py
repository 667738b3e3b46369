"""Ovis2: an image as the whole picture and tiles of its size.

    an image    start, 16 × 16 tokens of the whole, grid, 16 × 16 of a tile, column, … of the next, row, …, end

Start, grid, column, row and end are vectors that the checkpoint stores. Positions are one-dimensional. Every picture is
stretched to one size. An image has as few tiles as cover nine tenths of it at no more than its own resolution.
Source: `Ovis2Processor` and `Ovis2ImageProcessor` of transformers 5.24, formula for formula; arXiv 2405.20797.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest, StartupError
from gridsieve.common.contract.plan import FrameShape, Grid, Modality
from gridsieve.families.parts.tiled_images import embedded_rows, tile_views
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.layouts.processors import SQUARE, check_processors, size_of
from gridsieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.video.resize import check_aspect
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

_PAD = "<IMG_ATOM>"
# The tokens of transformers' processor in whose place its model puts the stored vectors, in their order.
_INDICATORS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
_IDS = [151666, 151667, 151668, 151669, 151670]
_COVERED = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Ovis2(Family):
    """side_px: of every picture. tokens: of each. max_tiles: of an image. indicators: id of the first stored vector."""

    side_px: int
    tokens: int
    max_tiles: int
    indicators: int

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Ovis2:
        config, image = checkpoint.config, checkpoint.processor("image")
        vision, files = config.part("vision_config"), checkpoint.read_json("tokenizer.json")
        check_processors(checkpoint, use_covering_area_grid=True)
        side_px, token_px = vision.whole("image_size"), vision.whole("patch_size") * vision.whole("hidden_stride", 1)
        if [*size_of(image, SQUARE).values()] != [side_px, side_px]:
            raise StartupError(f"the image processor's size is {image.get('size')}, vision_config's {side_px}")
        tokens, stated = (side_px // token_px) ** 2, checkpoint.read_json("processor_config.json")
        if stated.whole("image_seq_length", 256) != tokens:
            raise StartupError(
                f"image_seq_length is {stated.get('image_seq_length', 256)}, the tower makes {tokens} tokens"
            )
        added = {each["content"]: each["id"] for each in files.get("added_tokens", [])}
        ids, count = config.get("visual_indicator_token_ids", _IDS), vision.whole("num_visual_indicator_tokens", 5)
        if ids != [added.get(name) for name in _INDICATORS] or count != len(_INDICATORS):
            raise StartupError(
                f"visual_indicator_token_ids {ids}, {count} of them, are not the ids of {', '.join(_INDICATORS)}"
            )
        return cls(
            placeholders={Modality.IMAGE: "<image>"},
            pad=_PAD,
            token_px=token_px,
            frame_bounds=FrameBounds(fps=1.0, min_frames=1, max_frames=1, temporal_patch=1),
            fixed_tokens=True,
            side_px=side_px,
            tokens=tokens,
            max_tiles=image.whole("max_patches", 12) if image.get("crop_to_patches", False) else 1,
            indicators=config.part("text_config").whole("vocab_size"),
        )

    @property
    def markers(self) -> list[str]:
        return [*_INDICATORS]

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """The whole picture, and its tiles if they are several."""
        check_aspect(height_px, width_px)
        size = self.fixed_size((self.side_px, self.side_px), wish)
        columns, rows = self._tiles(height_px, width_px)
        if rows * columns == 1:
            side = self.side_px // self.token_px
            return ImageLayout(FrameShape(1, size), (None,), Grid(1, side, side), self._expanded(0, 0))
        frames = FrameShape(1 + rows * columns, size, tile_columns=columns)
        views = (None, *tile_views(rows, columns, size))
        return ImageLayout(frames, views, Grid(1, frames.count, self.tokens), self._expanded(rows, columns))

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """Of embeddings of an image without tiles. Raises InvalidRequest for a grid of other tokens."""
        if grid.slice_tokens != self.tokens:
            limit = f"{self.tokens} tokens for an image without tiles"
            raise InvalidRequest(field="embeds.grid", limit=limit, value=grid.slice_tokens)
        return self._expanded(0, 0)

    def embedded_image(self, grid: Grid, tile_columns: int, index: int) -> Expansion:
        """As of pixels. Raises InvalidRequest for other tiles."""
        if not tile_columns:
            return self.expansion(grid, None)
        return self._expanded(embedded_rows(grid, tile_columns, self.tokens), tile_columns)

    def _expanded(self, rows: int, columns: int) -> Expansion:
        """rows, columns: of tiles."""
        start, grid, column, row, end = range(self.indicators, self.indicators + len(_INDICATORS))
        one = LinearSpan(self.tokens)
        tiles = [part for tile in range(rows * columns) for part in (column if tile % columns else row, one)]
        return (start, one, grid, *tiles[1:], end)

    def _tiles(self, height_px: int, width_px: int) -> tuple[int, int]:
        """How many columns and rows: the fewest tiles that cover enough; if none do, the tiles that cover most.

        As in transformers, whose columns here are the rows of the tiles that were compared.
        """
        shapes = [
            (first, second)
            for first in range(1, self.max_tiles + 1)
            for second in range(1, self.max_tiles // first + 1)
        ]
        shapes.sort(key=lambda shape: shape[0] * shape[1])
        covered = {shape: self._covered(height_px, width_px, *shape) for shape in shapes}
        enough = [shape for shape in shapes if covered[shape] > _COVERED]
        if enough:
            return min(enough, key=lambda shape: (shape[0] * shape[1], -covered[shape]))
        return max(shapes, key=covered.__getitem__)

    def _covered(self, height_px: int, width_px: int, rows: int, columns: int) -> float:
        """The share of a picture's area that so many tiles show at its own resolution, at most."""
        areas = (
            _shown(height, width, self.side_px) for height in _cut(height_px, rows) for width in _cut(width_px, columns)
        )
        return sum(areas) / (height_px * width_px)


def _cut(length_px: int, parts: int) -> Iterator[int]:
    """The lengths of so many parts; the last one has what is left over."""
    each = length_px // parts
    yield from [each] * (parts - 1)
    yield length_px - each * (parts - 1)


def _shown(height_px: int, width_px: int, side_px: int) -> float:
    """The area of a picture once its longer side fits."""
    longer, shorter = max(height_px, width_px), min(height_px, width_px)
    return side_px * (shorter / longer * side_px) if longer > side_px else longer * shorter
