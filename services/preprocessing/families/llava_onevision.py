"""LLaVA-OneVision: an image alone as tiles of any resolution, several as squares, videos of pooled frames.

    one image       27 × 27 tokens of the whole picture, then those of its tiles, a newline behind each of their rows
    more images     27 × 27 tokens of a picture that is padded to a square, a newline
    a video         14 × 14 tokens of each frame, one newline

A newline is a vector that the checkpoint stores. Positions are one-dimensional. Frames are stretched to a square.
The processor does not sample frames unless it is asked: here a video has one a second, at most 32, which are as many as
the model was trained with.
Source: `LlavaOnevisionProcessor` and its image processor in transformers 5.24; arXiv 2408.03326.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from framesieve.common.anyres import AnyRes
from framesieve.common.checkpoint import Checkpoint, field_of
from framesieve.common.contract.errors import StartupError
from framesieve.common.contract.plan import FrameShape, Grid, Modality
from framesieve.services.preprocessing.families.tiles import (
    background_of,
    check_aspect,
    check_fixed,
    check_processors,
    check_untiled,
    evenly,
    placeholders_of,
    tiled,
)
from framesieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from framesieve.services.preprocessing.prompt.positions import LinearSpan
from framesieve.services.preprocessing.video.resize import View
from framesieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from framesieve.services.preprocessing.video.timing import TimeBase

_ANYRES = "anyres_max_"


@dataclass(frozen=True, slots=True)
class LlavaOnevision:
    """The settings of one checkpoint.

    tile_px: side of every frame. tokens: tokens of its side. newline: the id of the stored vector. background: the
    colour, RGB, around a picture that is padded to a square.
    """

    placeholders: Mapping[Modality, str]
    patch_px: int
    anyres: AnyRes
    newline: int
    background: tuple[int, int, int]

    embed_levels: ClassVar[int] = 0
    joins_parts: ClassVar[str | None] = None
    fixed_tokens: ClassVar[bool] = True
    template_options: ClassVar[Mapping[str, object]] = {}
    frame_bounds: ClassVar[FrameBounds] = FrameBounds(fps=1.0, min_frames=1, max_frames=32, temporal_patch=1)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> LlavaOnevision:
        """Raises StartupError for settings that are not supported or contradict each other."""
        config, image = checkpoint.config, checkpoint.processor("image")
        vision = config.get("vision_config") or {}
        check_processors(checkpoint)
        for name, settings in (("image", image), ("video", checkpoint.processor("video") or image)):
            size = settings.get("size") or {}
            if {size.get("height"), size.get("width")} != {vision.get("image_size")}:
                raise StartupError(f"the {name} processor's size is {size}, vision_config's {vision.get('image_size')}")
        aspect = config.get("vision_aspect_ratio", f"{_ANYRES}9")
        if not aspect.startswith(_ANYRES):
            raise StartupError(f"vision_aspect_ratio {aspect!r} is not supported, only {_ANYRES}…")
        if (selects := config.get("vision_feature_select_strategy", "full")) != "full":
            raise StartupError(f"vision_feature_select_strategy {selects!r} is not supported, only 'full'")
        return cls(
            placeholders=placeholders_of(checkpoint),
            patch_px=int(field_of(config, "vision_config", "patch_size")),
            anyres=AnyRes.of(config, int(aspect.removeprefix(_ANYRES))),
            newline=int(field_of(config, "text_config", "vocab_size")),
            background=background_of(image),
        )

    @property
    def pads(self) -> Mapping[Modality, str]:
        return self.placeholders

    @property
    def token_px(self) -> int:
        return self.patch_px

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """Evenly spaced indices from the first frame on."""
        return evenly(total_frames, average_rate, bounds)

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """Raises InvalidRequest for fewer pixels than a frame has, and MediaRejected for an aspect ratio above 200."""
        check_aspect(height_px, width_px)
        check_fixed(self.anyres.tile_px, wish)
        if images == 1:
            return tiled(self.anyres, self.newline, height_px, width_px)
        side, tokens = self.anyres.tile_px, self.anyres.tile_tokens
        squared = None if height_px == width_px else self.background
        grid = Grid(1, tokens, tokens)
        view = View(side, side, squared=squared)
        return ImageLayout(FrameShape(1, (side, side)), (view,), grid, self.expansion(grid, None))

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> tuple[int, int]:
        """The size of every frame. Raises InvalidRequest for fewer pixels than it has."""
        check_fixed(self.anyres.tile_px, wish)
        return self.anyres.tile_px, self.anyres.tile_px

    def video_view(self, height_px: int, width_px: int, sent: tuple[int, int]) -> View | None:
        """Frames are stretched."""
        return None

    def grid(self, frames: int, height_px: int, width_px: int, modality: Modality) -> Grid:
        """The grid of pooled tokens of a video."""
        side = math.ceil(self.anyres.tile_tokens / 2)
        return Grid(frames, side, side)

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """One span and a newline."""
        return (LinearSpan(grid.tokens), self.newline)

    def embedded_image(self, grid: Grid, tile_columns: int, index: int) -> Expansion:
        """One span and a newline. Raises InvalidRequest for tiles."""
        check_untiled(tile_columns)
        return self.expansion(grid, None)
