"""LLaVA-OneVision: an image alone as tiles of any resolution, several as squares, videos of pooled frames.

    one image       27 × 27 tokens of the whole picture, then those of its tiles, a newline behind each of their rows
    more images     27 × 27 tokens of a picture that is padded to a square, a newline
    a video         14 × 14 tokens of each frame, one newline

A newline is a vector that the checkpoint stores. Positions are one-dimensional. Frames are stretched to a square.
The processor does not sample frames unless it is asked: here a video has one a second, at most 32, which are as many as
the model was trained with.
Source: `LlavaOnevisionProcessor` and its image processor in transformers 5.23; arXiv 2408.03326.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import ClassVar

from common.anyres import AnyRes
from common.checkpoint import Checkpoint
from common.contract.errors import InvalidRequest, MediaRejected, StartupError
from common.contract.plan import Grid, Modality
from services.preprocessing.prompt.layout import Expansion, ImageLayout
from services.preprocessing.prompt.positions import LinearSpan
from services.preprocessing.video.resize import MAX_ASPECT_RATIO, View
from services.preprocessing.video.sampling import FrameBounds, FrameSampling
from services.preprocessing.video.timing import TimeBase

_ONLY = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}
_MEAN = (0.48145466, 0.4578275, 0.40821073)
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
    frame_bounds: ClassVar[FrameBounds] = FrameBounds(fps=1.0, min_frames=1, max_frames=32, temporal_patch=1)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> LlavaOnevision:
        """Raises StartupError for settings that are not supported or contradict each other."""
        config, image = checkpoint.config, checkpoint.processor("image")
        vision, text = config.get("vision_config") or {}, config.get("text_config") or {}
        for name, settings in (("image", image), ("video", checkpoint.processor("video") or image)):
            for key, value in _ONLY.items():
                if settings.get(key, value) != value:
                    raise StartupError(f"the {name} processor's {key} is {settings[key]}, only {value} is supported")
            size = settings.get("size") or {}
            if {size.get("height"), size.get("width")} != {vision.get("image_size")}:
                raise StartupError(f"the {name} processor's size is {size}, vision_config's {vision.get('image_size')}")
        aspect = config.get("vision_aspect_ratio", f"{_ANYRES}9")
        if not aspect.startswith(_ANYRES) or config.get("vision_feature_select_strategy", "full") != "full":
            raise StartupError(
                "only vision_aspect_ratio anyres_max_… and vision_feature_select_strategy full are supported"
            )
        added = {token["id"]: str(token["content"]) for token in checkpoint.read_json("tokenizer.json")["added_tokens"]}
        return cls(
            placeholders={
                modality: added.get(config.get(f"{modality.value}_token_index"), f"<{modality.value}>")
                for modality in (Modality.IMAGE, Modality.VIDEO)
            },
            patch_px=int(vision["patch_size"]),
            anyres=AnyRes.of(config, int(aspect.removeprefix(_ANYRES))),
            newline=int(text["vocab_size"]),
            background=tuple(int(255 * value) for value in image.get("image_mean", _MEAN)),  # type: ignore[arg-type]
        )

    @property
    def token_px(self) -> int:
        return self.patch_px

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """Evenly spaced indices from the first frame on, as `BaseVideoProcessor.sample_frames` chooses them."""
        wanted = int(total_frames / float(average_rate) * bounds.fps)
        frames = bounds.num_frames or max(1, min(max(wanted, bounds.min_frames), bounds.max_frames, total_frames))
        return tuple(int(index * total_frames / frames) for index in range(min(frames, total_frames)))

    def image(self, height_px: int, width_px: int, wish: FrameSampling, images: int) -> ImageLayout:
        """Raises InvalidRequest for fewer pixels than a frame has, and MediaRejected for an aspect ratio above 200."""
        if max(height_px, width_px) > MAX_ASPECT_RATIO * min(height_px, width_px):
            raise MediaRejected(
                f"has {width_px}×{height_px} pixels, an aspect ratio of at most {MAX_ASPECT_RATIO} is allowed"
            )
        side = self._side(wish)
        if images > 1:
            grid = Grid(1, self.anyres.tile_tokens, self.anyres.tile_tokens)
            squared = None if height_px == width_px else self.background
            return ImageLayout(side, side, (View(side, side, squared=squared),), grid, self.expansion(grid, None))
        tiles = self.anyres.tiles(height_px, width_px)
        views = (
            View(tiles.height_px, tiles.width_px, row * side - tiles.top_px, column * side - tiles.left_px)
            for row in range(tiles.rows)
            for column in range(tiles.columns)
        )
        whole = self.anyres.tile_tokens**2
        rows, columns = tiles.shrunk
        grid = Grid(1, 1, whole + rows * columns)
        row = (LinearSpan(columns), self.newline)
        return ImageLayout(side, side, (None, *views), grid, (LinearSpan(whole), *row * rows))

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> tuple[int, int]:
        """The size of every frame. Raises InvalidRequest for fewer pixels than it has."""
        side = self._side(wish)
        return side, side

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

    def _side(self, wish: FrameSampling) -> int:
        side = self.anyres.tile_px
        if wish.max_pixels is not None and wish.max_pixels < side**2:
            raise InvalidRequest(
                f"frame_sampling.max_pixels must be at least {side**2}, which this model's frames always have, got "
                f"{wish.max_pixels}"
            )
        return side
