"""The common parts of Qwen's, GLM's, Cosmos' and VideoLLaMA's families: processor settings, sampling bounds, sizes and
grids.

Each family adds how it samples and sizes videos, and the expansion of its placeholders.
Source: `Qwen2VLImageProcessor` of transformers 5.24, which Qwen's use, and the files where it reads settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Self

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import FrameShape, Grid, Modality, SizePx
from gridsieve.common.fields import Fields
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.layouts.processors import check_processors
from gridsieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from gridsieve.services.preprocessing.prompt.positions import GridSpan
from gridsieve.services.preprocessing.video.resize import PixelBudget, shrink_to, smart_resize
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

PLACEHOLDERS: Mapping[Modality, str] = {Modality.IMAGE: "<|image_pad|>", Modality.VIDEO: "<|video_pad|>"}
# Defaults of transformers' processors. Qwen2-VL's class says fps=None, but the models were trained at 2.
_IMAGE_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
_MIN_FRAMES = 4


@dataclass(frozen=True, slots=True)
class VideoDefaults:
    """Defaults of a family's own classes for settings that the checkpoint leaves out.

    patch_px: of the model. size, image_size: of the video and the image processor, in pixels. max_tokens: limit for
    cap_pixels_per_frame; 0: it is not read. old_names: the processors, image or video, whose min_pixels and max_pixels
    override the size. only: supported values of settings that the family does not read. temporal_patch: frames of a
    patch. image_merge: patches per side of an image's token; None: as many as of a video's. fps, max_frames: of videos.
    sized_as_images: whether the size of images is that of videos whose processor has no file of its own.
    """

    patch_px: int
    size: Mapping[str, int]
    max_tokens: int
    old_names: tuple[str, ...]
    image_size: Mapping[str, int] = field(default_factory=lambda: _IMAGE_SIZE)
    only: Mapping[str, object] = field(default_factory=lambda: {"num_frames": None})
    temporal_patch: int = 2
    image_merge: int | None = None
    fps: float = 2.0
    max_frames: int = 768
    sized_as_images: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class QwenVL(Family):
    """The settings of one checkpoint.

    max_video_tokens: limit on a video's pixels if the checkpoint sets cap_pixels_per_frame, else None.
    """

    image_budget: PixelBudget
    video_budget: PixelBudget
    max_video_tokens: int | None

    @classmethod
    def read(cls, checkpoint: Checkpoint, defaults: VideoDefaults, **own: Any) -> Self:
        """Reads the settings. own: fields of the subclass, and those that are not read as by default.

        Raises StartupError for unsupported or conflicting ones.
        """
        vision = checkpoint.config.part("vision_config")
        patch, merge = vision.whole("patch_size", defaults.patch_px), vision.whole("spatial_merge_size", 2)
        image_merge = defaults.image_merge or merge
        temporal = vision.whole("temporal_patch_size", defaults.temporal_patch)
        image = checkpoint.processor("image")
        own_video = checkpoint.processor("video")
        video = own_video or image
        check_processors(checkpoint, **defaults.only)
        for name, settings, merged in (("image", image, image_merge), ("video", video, merge)):
            for key, value in (("patch_size", patch), ("merge_size", merged), ("temporal_patch_size", temporal)):
                if settings.get(key, value) != value:
                    raise StartupError(f"the {name} processor's {key} is {settings[key]}, the model's is {value}")
        fields: dict[str, Any] = {
            "placeholders": PLACEHOLDERS,
            "token_px": patch * merge,
            "image_budget": _budget(image, patch * image_merge, defaults.image_size, "image" in defaults.old_names),
            "video_budget": _budget(
                video if defaults.sized_as_images else own_video,
                patch * merge,
                defaults.size,
                "video" in defaults.old_names,
            ),
            "max_video_tokens": video.whole("max_video_tokens", defaults.max_tokens)
            if defaults.max_tokens and video.get("cap_pixels_per_frame")
            else None,
            "frame_bounds": FrameBounds(
                fps=video.number("fps", defaults.fps),
                min_frames=video.whole("min_frames", _MIN_FRAMES),
                max_frames=video.whole("max_frames", defaults.max_frames),
                temporal_patch=temporal,
            ),
        }
        return cls(**{**fields, **own})

    def image_size(self, height_px: int, width_px: int, wish: FrameSampling) -> SizePx:
        """Height and width of an image after resizing. Raises MediaRejected."""
        budget = self.image_budget
        return smart_resize(
            height_px, width_px, budget if wish.max_pixels is None else at_most(budget, wish.max_pixels)
        )

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """One frame, resized."""
        size, side = self.image_size(height_px, width_px, wish), self.image_budget.factor_px
        if wish.max_pixels is not None:
            size = shrink_to(*size, side, wish.max_pixels)
        grid = Grid(1, size[0] // side, size[1] // side)
        return ImageLayout(FrameShape(1, size), (None,), grid, self.expansion(grid, None))

    def video_grid(self, frames: int, height_px: int, width_px: int) -> Grid:
        """A slice for each temporal patch."""
        return Grid(frames // self.frame_bounds.temporal_patch, height_px // self.token_px, width_px // self.token_px)


def by_slice(grid: Grid, base: TimeBase | None, texts: Callable[[float], tuple[str, str]]) -> Expansion:
    """For each slice its grid, between the texts for its time in seconds. For an image one grid alone."""
    one = GridSpan(Grid(1, grid.h, grid.w), Fraction(0))
    if base is None:
        return (one,)
    parts: list[str | GridSpan] = []
    for before, after in map(texts, base.slices_s):
        parts += (before, one, after)
    return tuple(parts)


def at_least_a_token(height_px: int, width_px: int, token_px: int) -> SizePx:
    """Height and width of a picture, grown in its aspect until neither side is shorter than a token's."""
    if min(height_px, width_px) >= token_px:
        return height_px, width_px
    scale = max(token_px / height_px, token_px / width_px)
    return int(height_px * scale), int(width_px * scale)


def at_most(budget: PixelBudget, max_px: int) -> PixelBudget:
    """The budget with another maximum; its minimum is lowered to that if necessary."""
    return replace(budget, min_px=min(budget.min_px, max_px), max_px=max_px)


def _budget(settings: Fields, factor_px: int, defaults: Mapping[str, int], old_names: bool) -> PixelBudget:
    """The budget in a processor's settings or in `defaults`. old_names: min_pixels and max_pixels override the size.

    Raises StartupError for a size of other fields.
    """
    size = settings.part("size") if "size" in settings else Fields(settings.file, defaults, "size.")
    least, most = (
        settings.whole(old) if old_names and old in settings else size.whole(name)
        for old, name in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))
    )
    return PixelBudget(factor_px=factor_px, min_px=least, max_px=most)
