"""Images of any resolution, for the families that send them as tiles: the whole picture, then its tiles, row by row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import FrameShape, Grid, Modality, SizePx
from gridsieve.common.fields import Fields
from gridsieve.families.llava.anyres import AnyRes
from gridsieve.families.parts.sampling import count_of, firsts_of_shares
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.layouts.processors import check_processors, placeholder_of
from gridsieve.services.preprocessing.prompt.layout import ImageLayout
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.video.resize import View
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledFamily(Family):
    """anyres: the tiles of an image. newline: id of the vector that the checkpoint stores for the end of a row."""

    anyres: AnyRes
    newline: int

    @classmethod
    def read(
        cls,
        checkpoint: Checkpoint,
        anyres: AnyRes,
        selects: str,
        max_frames: int,
        sizes_of: Callable[[Fields], Mapping[str, object]],
        **own: Any,
    ) -> Self:
        """selects: the only `vision_feature_select_strategy`. max_frames: of a video, unless a request says otherwise.
        sizes_of: the sizes that a processor makes, which must be those of a tile. own: fields of the subclass."""
        config, image = checkpoint.config, checkpoint.processor("image")
        video = checkpoint.processor("video") or image
        check_processors(checkpoint, num_frames=None)
        for name, settings in (("image", image), ("video", video)):
            sizes = sizes_of(settings)
            if any(each != anyres.tile_px for each in sizes.values()):
                raise StartupError(f"the {name} processor's sizes are {sizes}, a tile's is {anyres.tile_px}")
        if (selected := config.get("vision_feature_select_strategy", selects)) != selects:
            raise StartupError(f"vision_feature_select_strategy {selected!r} is not supported, only {selects!r}")
        return cls(
            placeholders={kind: placeholder_of(checkpoint, kind) for kind in (Modality.IMAGE, Modality.VIDEO)},
            token_px=config.part("vision_config").whole("patch_size"),
            frame_bounds=FrameBounds(video.number("fps", 1.0), 1, max_frames, temporal_patch=1),
            fixed_tokens=True,
            anyres=anyres,
            newline=config.part("text_config").whole("vocab_size"),
            **own,
        )

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
        """The first of each of evenly divided shares."""
        return firsts_of_shares(total_frames, count_of(total_frames, average_rate, bounds))

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        return self.fixed_size((self.anyres.tile_px, self.anyres.tile_px), wish)
