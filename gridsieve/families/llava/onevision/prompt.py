"""LLaVA-OneVision: an image alone as tiles of any resolution, several as squares, videos of pooled frames.

    one image       27 × 27 tokens of the whole picture, then those of its tiles, a newline after each of their rows
    more images     27 × 27 tokens of a picture that is padded to a square, a newline
    a video         14 × 14 tokens of each frame, one newline

A newline is a vector that the checkpoint stores. Positions are one-dimensional. Frames are stretched to a square.
The processor does not sample frames unless it is asked: here a video has `fps` of its file, else one a second, at most
32, which are as many as the model was trained with.
Source: `LlavaOnevisionProcessor` and its image processor in transformers 5.24; arXiv 2408.03326.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import FrameShape, Grid
from gridsieve.common.fields import Fields
from gridsieve.families.llava.anyres import AnyRes
from gridsieve.families.llava.tiled_prompt import TiledFamily
from gridsieve.services.preprocessing.layouts.processors import SQUARE, background_of, size_of
from gridsieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.video.resize import View, check_aspect
from gridsieve.services.preprocessing.video.sampling import FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase


def _sizes(processor: Fields) -> Mapping[str, object]:
    size = size_of(processor, ["shortest_edge"])
    return {name: size.get(name) for name in SQUARE}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaOnevision(TiledFamily):
    """background: the colour, RGB, around a picture that is padded to a square."""

    background: tuple[int, int, int]

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        anyres, background = AnyRes.of_onevision(checkpoint.config), background_of(checkpoint.processor("image"))
        return cls.read(checkpoint, anyres, "full", 32, _sizes, background=background)

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """The whole picture and its tiles; of several images each as one square."""
        check_aspect(height_px, width_px)
        size, tokens = self.video_size(height_px, width_px, 1, wish), self.anyres.tile_tokens
        if images == 1:
            return self.tiled(height_px, width_px)
        view = View(*size, squared=None if height_px == width_px else self.background)
        grid = Grid(1, tokens, tokens)
        return ImageLayout(FrameShape(1, size), (view,), grid, self.expansion(grid, None))

    def video_grid(self, frames: int, height_px: int, width_px: int) -> Grid:
        """The grid of pooled tokens of a video."""
        side = math.ceil(self.anyres.tile_tokens / 2)
        return Grid(frames, side, side)

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """One span and a newline."""
        return (LinearSpan(grid.tokens), self.newline)
