"""MiniCPM-V 4.6 and 4.7: an image as a whole and slices of its own resolution, each a grid of tokens; a video as its
frames.

    an image    <image_id>0</image_id><image>8 × 8 tokens</image><slice>…</slice>…  newline between rows of slices
    a video     <image>8 × 8 tokens</image><image>8 × 8 tokens</image>…

Sides are multiples of a token: 4 patches where the tower merges twice (16x), 2 where it merges once (4x). Positions are
one-dimensional in 4.6, and those of canvases in 4.7. Frames of videos are not sliced and videos have no number, as the
README of 4.6 asks of the processor.
Source: `MiniCPMV4_6Processor`, `MiniCPMV4_6ImageProcessor` and `MiniCPMV4_6VideoProcessor` of transformers 5.24,
`MiniCPMV4_7Processor`, and the README of openbmb/MiniCPM-V-4.6.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Grid, Modality, SizePx
from gridsieve.families.minicpm.slicing import Slicing
from gridsieve.families.minicpm.versions import merged_side
from gridsieve.families.parts.sampling import firsts_of_shares
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.layouts.processors import check_processors
from gridsieve.services.preprocessing.prompt.canvas import CanvasSpan
from gridsieve.services.preprocessing.prompt.control_tokens import named_tokens
from gridsieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.video.resize import shrink_to
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

_NAMES = {
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "image_start_token": "<image>",
    "image_end_token": "</image>",
    "slice_start_token": "<slice>",
    "slice_end_token": "</slice>",
    "image_id_start_token": "<image_id>",
    "image_id_end_token": "</image_id>",
}
# The ids in config.json of what canvases take as markers.
_MARKERS = ("image_start_id", "image_end_id", "slice_start_id", "slice_end_id", "newline_id")
_CANVAS = "minicpmv4_7"
# Of a long video, frames are chosen among the tenths of its seconds.
_TENTHS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPMV46(Family):
    """pictures, frames: how images and frames of videos are sent. numbers_images: whether each has its number before
    it. names: of control tokens."""

    pictures: Slicing
    frames: Slicing
    numbers_images: bool
    names: Mapping[str, str]

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> MiniCPMV46:
        config, image, video = checkpoint.config, checkpoint.processor("image"), checkpoint.processor("video")
        patch_px = config.part("vision_config").whole("patch_size")
        token_px = patch_px * merged_side(config)
        mode = str(config.get("downsample_mode", "16x"))
        check_processors(checkpoint, downsample_mode=mode, patch_size=patch_px, stack_frames=1, do_sample_frames=True)
        has_canvas, names = checkpoint.model_type == _CANVAS, _NAMES | named_tokens(checkpoint)
        most = image.whole("max_slice_nums", 9) if image.get("slice_mode", True) else 1
        return cls(
            placeholders={Modality.IMAGE: names["image_token"], Modality.VIDEO: names["video_token"]},
            token_px=token_px,
            frame_bounds=FrameBounds(1.0, 1, video.whole("max_num_frames", 128), temporal_patch=1),
            canvas_markers=tuple(config.whole(name, least=0) for name in _MARKERS) if has_canvas else (),
            pictures=Slicing(image.whole("scale_resolution", 448), most, token_px),
            frames=Slicing(video.whole("scale_resolution", 448), 1, token_px),
            numbers_images=bool(image.get("use_image_id", True)),
            names=names,
        )

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """The frame at each second, or step of another length; of longer videos as many of each tenth of one, spread
        from the first to the last. As many as are asked for: the first of each of evenly divided shares.
        """
        rate, last = float(average_rate), total_frames - 1
        steps = total_frames / rate * bounds.fps
        wanted = bounds.num_frames
        if wanted is None and math.ceil(steps) < bounds.min_frames:
            wanted = bounds.min_frames
        if wanted is not None:
            return firsts_of_shares(total_frames, min(wanted, total_frames))
        if steps <= bounds.max_frames:
            return tuple(min(int(number / bounds.fps * rate), last) for number in range(math.ceil(steps)))
        tenths = int(steps / (1 / _TENTHS))
        chosen = np.linspace(0, tenths - 1, bounds.max_frames, dtype=int).tolist()
        return tuple(min(int(number / _TENTHS / bounds.fps * rate), last) for number in chosen)

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """The whole picture, and its slices. Raises MediaRejected for an aspect ratio above 200."""
        sliced = self.pictures.of(height_px, width_px, wish.max_pixels)
        if wish.max_pixels is not None:  # one without slices grows to the pixels of a slice
            source, tile = (shrink_to(*size, self.token_px, wish.max_pixels) for size in (sliced.source, sliced.tile))
            sliced = replace(sliced, source=source, tile=tile)
        whole, slice_ = self._side(sliced.source), self._side(sliced.tile)
        if not sliced.slices:
            grid = Grid(1, *whole)
            return ImageLayout(sliced.frames, sliced.views, grid, self.embedded_image(grid, 0, index))
        canvas = sliced.rows * slice_[0], sliced.columns * slice_[1]
        parts = [*self._number(index), *self._marked("image", self._span(whole, canvas))]
        for row in range(sliced.rows):
            if row:
                parts.append("\n")
            for column in range(sliced.columns):
                corner = row * slice_[0], column * slice_[1]
                parts += self._marked("slice", self._span(slice_, canvas, corner))
        tokens = math.prod(whole) + sliced.slices * math.prod(slice_)
        return ImageLayout(sliced.frames, sliced.views, Grid(1, 1, tokens), tuple(parts))

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        """As of an image without slices."""
        return self.frames.of(height_px, width_px).source

    def video_grid(self, frames: int, height_px: int, width_px: int) -> Grid:
        """A slice for each frame."""
        return Grid(frames, *self._side((height_px, width_px)))

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """Each frame between its markers."""
        side = grid.h, grid.w
        return tuple(self._marked("image", self._span(side, side))) * grid.t

    def embedded_image(self, grid: Grid, tile_columns: int, index: int) -> Expansion:
        """As of the pixels of an image without slices. Raises InvalidRequest for slices, whose grids are not known."""
        if tile_columns:
            text = "must be 0 for this model: embeddings of images with slices are not supported"
            raise InvalidRequest(f"{text}, got {tile_columns}", field="embeds.tile_columns")
        return (*self._number(index), *self.expansion(grid, None))

    def _side(self, size_px: SizePx) -> tuple[int, int]:
        """Rows and columns of the tokens of a picture."""
        return size_px[0] // self.token_px, size_px[1] // self.token_px

    def _span(
        self, side: tuple[int, int], canvas: tuple[int, int], corner: tuple[int, int] | None = None
    ) -> LinearSpan | CanvasSpan:
        return CanvasSpan(side, canvas, corner) if self.canvas_markers else LinearSpan(math.prod(side))

    def _number(self, index: int) -> Iterator[str]:
        if self.numbers_images:
            yield f"{self.names['image_id_start_token']}{index}{self.names['image_id_end_token']}"

    def _marked(self, kind: str, span: LinearSpan | CanvasSpan) -> Iterator[str | LinearSpan | CanvasSpan]:
        yield from (self.names[f"{kind}_start_token"], span, self.names[f"{kind}_end_token"])
