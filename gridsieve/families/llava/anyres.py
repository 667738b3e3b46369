"""Images of any resolution as tiles of one size, and which of the tiles' tokens remain.

    picture 600 × 300 ──▶ the resolution of `pinpoints` that wastes least, 768 × 768
    ┌───┬───┐  resized to 768 × 384 and padded with black; four tiles of 384 × 384, after one of the whole picture
    │▓▓▓│▓▓▓│
    ├───┼───┤  54 × 54 tokens, of which the 27 rows that show the picture remain; more than `max_tiles` tiles of
    │   │   │  tokens are shrunk to these
    └───┴───┘

Sources: LLaVA-OneVision, arXiv 2408.03326; `select_best_resolution`, `get_patch_output_size`, `unpad_image` and
`pack_image_features` of transformers 5.24, formula for formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gridsieve.common.contract.errors import StartupError
from gridsieve.common.fields import Fields

_SHRUNK_ABOVE = 1.1
# Of LLaVA-OneVision's config: after it, the number of tiles of tokens that remain.
_ASPECT = "anyres_max_"


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one picture is tiled.

    rows, columns: of tiles. height_px, width_px: of the resized picture. top_px, left_px: black before it. unpadded:
    rows and columns of tokens that show the picture; shrunk: those that remain.
    """

    rows: int
    columns: int
    height_px: int
    width_px: int
    top_px: int
    left_px: int
    unpadded: tuple[int, int]
    shrunk: tuple[int, int]


@dataclass(frozen=True, slots=True)
class AnyRes:
    """tile_px: side of a tile. tile_tokens: tokens of its side. pinpoints: heights and widths of what tiles make
    together. max_tiles: tiles of tokens that remain; None: all."""

    tile_px: int
    tile_tokens: int
    pinpoints: tuple[tuple[int, int], ...]
    max_tiles: int | None

    @classmethod
    def of(cls, whole: Mapping[str, Any], max_tiles: int | None) -> AnyRes:
        """From a whole model's config. Raises StartupError for a field that it lacks, or that has another form."""
        config = Fields("config.json", whole)
        tile_px, patch_px = (config.part("vision_config").whole(name) for name in ("image_size", "patch_size"))
        try:
            pinpoints = tuple((int(height), int(width)) for height, width in config["image_grid_pinpoints"])
        except (TypeError, ValueError) as error:
            raise config.refusal("image_grid_pinpoints", "a list of heights and widths") from error
        return cls(tile_px, tile_px // patch_px, pinpoints, max_tiles)

    @classmethod
    def of_onevision(cls, config: Mapping[str, Any]) -> AnyRes:
        """From a whole model's config, whose `vision_aspect_ratio` says how many tiles remain. Raises as `of`."""
        aspect = str(config.get("vision_aspect_ratio", f"{_ASPECT}9"))
        if not (aspect.startswith(_ASPECT) and aspect.removeprefix(_ASPECT).isdecimal()):
            raise StartupError(f"vision_aspect_ratio {aspect!r} is not supported, only {_ASPECT}…")
        return cls.of(config, int(aspect.removeprefix(_ASPECT)))

    def tiles(self, height_px: int, width_px: int) -> Tiles:
        """The tiles of a picture of this size."""
        height, width = _best(height_px, width_px, self.pinpoints)
        resized_height, resized_width = _inside(height_px, width_px, height, width)
        rows, columns = height // self.tile_px, width // self.tile_px
        unpadded = self._unpadded(height_px, width_px, rows * self.tile_tokens, columns * self.tile_tokens)
        return Tiles(
            rows=rows,
            columns=columns,
            height_px=resized_height,
            width_px=resized_width,
            top_px=(height - resized_height) // 2,
            left_px=(width - resized_width) // 2,
            unpadded=unpadded,
            shrunk=self._shrunk(*unpadded),
        )

    def _unpadded(self, height_px: int, width_px: int, rows: int, columns: int) -> tuple[int, int]:
        if width_px / height_px > columns / rows:
            padding = (rows - int(round(height_px * (columns / width_px), 7))) // 2
            return rows - 2 * padding, columns
        padding = (columns - int(round(width_px * (rows / height_px), 7))) // 2
        return rows, columns - 2 * padding

    def _shrunk(self, rows: int, columns: int) -> tuple[int, int]:
        if self.max_tiles is None:
            return rows, columns
        ratio = math.sqrt(rows * columns / (self.max_tiles * self.tile_tokens**2))
        return (int(rows // ratio), int(columns // ratio)) if ratio > _SHRUNK_ABOVE else (rows, columns)


def _best(height_px: int, width_px: int, pinpoints: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The resolution that shows most pixels of the picture, and of these the smallest."""

    def shown(height: int, width: int) -> int:
        scale = min(width / width_px, height / height_px)
        return min(int(width_px * scale) * int(height_px * scale), width_px * height_px)

    return max(pinpoints, key=lambda size: (shown(*size), shown(*size) - size[0] * size[1]))


def _inside(height_px: int, width_px: int, height: int, width: int) -> tuple[int, int]:
    """The size of the picture inside a resolution, at its own aspect."""
    across, down = width / width_px, height / height_px
    if across < down:
        return min(math.ceil(height_px * across), height), width
    return height, min(math.ceil(width_px * down), width)
