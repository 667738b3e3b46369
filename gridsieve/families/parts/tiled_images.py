"""Images in tiles of one size, row by row: what each tile shows, and the rows of tiles whose embeddings came with a
prompt."""

from __future__ import annotations

from collections.abc import Iterator

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Grid, SizePx
from gridsieve.services.preprocessing.video.resize import View


def tile_views(
    rows: int, columns: int, tile_px: SizePx, through: tuple[SizePx, ...] = (), lanczos: bool = False
) -> Iterator[View]:
    """The views of tiles of this height and width, which make up the resized image. through, lanczos: see `View`."""
    height, width = tile_px
    for row in range(rows):
        for column in range(columns):
            yield View(rows * height, columns * width, row * height, column * width, through=through, lanczos=lanczos)


def embedded_rows(grid: Grid, tile_columns: int, tokens: int) -> int:
    """How many rows of tiles an image has whose embeddings came with the prompt, and whose whole picture and tiles have
    so many `tokens` each; 0: it has no tiles.

    grid: (1, 1 + tiles, tokens). Raises InvalidRequest for a grid or columns that no such image has.
    """
    if grid.w != tokens:
        limit = f"{tokens}, the tokens of the whole picture and of each tile"
        raise InvalidRequest(field="embeds.grid.w", limit=limit, value=grid.w)
    tiles = grid.h - 1
    if not tiles and tile_columns:
        text = f"of an image without tiles must be 0, got {tile_columns}"
        raise InvalidRequest(text, field="embeds.tile_columns")
    if tiles and (tile_columns < 1 or tiles % tile_columns):
        text = f"must divide the image's tiles, {tiles} by embeds.grid.h, got {tile_columns}"
        raise InvalidRequest(text, field="embeds.tile_columns")
    return tiles // tile_columns if tiles else 0
