"""Images of any resolution, for the families that send them as tiles: the whole picture, then its tiles, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from gridsieve.common.contract.plan import FrameShape, Grid, SizePx
from gridsieve.families.llava.anyres import AnyRes
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.prompt.layout import ImageLayout
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.video.resize import View
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledFamily(Family):
    """anyres: the tiles of an image. newline: id of the vector that the checkpoint stores for the end of a row."""

    anyres: AnyRes
    newline: int

    def tiled(self, height_px: int, width_px: int) -> ImageLayout:
        """The layout of an image: the whole, and the tokens of its tiles with a newline after each row."""
        tiles, side = self.anyres.tiles(height_px, width_px), self.anyres.tile_px
        views = (
            View(tiles.height_px, tiles.width_px, row * side - tiles.top_px, column * side - tiles.left_px)
            for row in range(tiles.rows)
            for column in range(tiles.columns)
        )
        whole, (rows, columns) = self.anyres.tile_tokens**2, tiles.shrunk
        row_of_tokens = (LinearSpan(columns), self.newline)
        grid = Grid(1, 1, whole + rows * columns)
        expansion = (LinearSpan(whole), *row_of_tokens * rows)
        frames = FrameShape(1 + tiles.rows * tiles.columns, (side, side), tile_columns=tiles.columns)
        return ImageLayout(frames, (None, *views), grid, expansion)

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """Evenly spaced from the first frame on, as in `BaseVideoProcessor.sample_frames` of transformers 5.24."""
        wanted = int(total_frames / float(average_rate) * bounds.fps)
        frames = bounds.num_frames or max(1, min(max(wanted, bounds.min_frames), bounds.max_frames, total_frames))
        return tuple(int(index * total_frames / frames) for index in range(min(frames, total_frames)))

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        """The size of every frame."""
        return self.fixed_size((self.anyres.tile_px, self.anyres.tile_px), wish)
