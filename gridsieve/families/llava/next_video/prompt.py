"""LLaVA-NeXT-Video: images as tiles of any resolution, videos of pooled frames.

    an image    24 × 24 tokens of the whole picture, then those of its tiles, a newline after each of their rows
    a video     12 × 12 tokens of each frame

A newline is a vector that the checkpoint stores. Positions are one-dimensional. A video's frame is resized until its
shorter side fits, and its centre cut out. The processor does not sample frames unless it is asked: here a video has
`fps` of its file, else one a second, at most 16, which with an answer fit into the context of published checkpoints.
Source: `LlavaNextVideoProcessor` and its image and video processors in transformers 5.24.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid, SizePx
from gridsieve.common.fields import Fields
from gridsieve.families.llava.anyres import AnyRes
from gridsieve.families.llava.tiled_prompt import TiledFamily
from gridsieve.services.preprocessing.layouts.processors import SQUARE, size_of
from gridsieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.video.resize import View, centre_view, check_aspect
from gridsieve.services.preprocessing.video.sampling import FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase


def _sizes(processor: Fields) -> Mapping[str, object]:
    size, crop = size_of(processor, ["shortest_edge"]), size_of(processor, SQUARE, "crop_size")
    return {"size": size.get("shortest_edge"), **{name: crop.get(name) for name in SQUARE}}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaNextVideo(TiledFamily):
    """stride: patches per side of a pooled token."""

    stride: int

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        config = checkpoint.config
        stride = config.whole("spatial_pool_stride", 2)
        return cls.read(checkpoint, AnyRes.of(config, None), "default", 16, _sizes, stride=stride)

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """The whole picture and its tiles."""
        self.video_size(height_px, width_px, 1, wish)  # raises
        return self.tiled(height_px, width_px)

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        check_aspect(height_px, width_px)
        return self.fixed_size((self.anyres.tile_px, self.anyres.tile_px), wish)

    def video_view(self, height_px: int, width_px: int, sent_px: SizePx) -> View | None:
        """The centre of the frame, whose shorter side is resized to the sent one."""
        return centre_view(height_px, width_px, sent_px[0], sent_px)

    def video_grid(self, frames: int, height_px: int, width_px: int) -> Grid:
        """The grid of pooled tokens of a video."""
        side = self.anyres.tile_tokens // self.stride
        return Grid(frames, side, side)

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """One span, and after embeddings of an image a newline."""
        return (LinearSpan(grid.tokens), *(() if base else (self.newline,)))
