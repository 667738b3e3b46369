"""The common parts of Qwen's vision-language families: processor settings, sampling bounds, image sizes and grids.

Each family adds how it samples and sizes videos, and the expansion of its placeholders.
Source: `Qwen2VLImageProcessor` of transformers 5.24, which all of them use, and the files where it reads settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.errors import StartupError
from framesieve.common.contract.plan import FrameShape, Grid, Modality
from framesieve.services.preprocessing.families.tiles import check_untiled
from framesieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from framesieve.services.preprocessing.video.resize import PixelBudget, View, shrink_to, smart_resize
from framesieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from framesieve.services.preprocessing.video.timing import TimeBase

# Defaults of transformers' processors. Qwen2-VL's class says fps=None, but the models were trained at 2.
_IMAGE_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
_FPS, _MIN_FRAMES, _MAX_FRAMES = 2, 4, 768
_BICUBIC = 3


@dataclass(frozen=True, slots=True)
class VideoDefaults:
    """Defaults of a family's own classes for settings that the checkpoint leaves out.

    patch_px: of the model. size: of the video processor, in pixels. max_tokens: limit for cap_pixels_per_frame.
    old_names: whether min_pixels and max_pixels override the size.
    """

    patch_px: int
    size: Mapping[str, int]
    max_tokens: int
    old_names: bool


@dataclass(frozen=True, slots=True)
class QwenVL:
    """The settings of one checkpoint.

    max_video_tokens: limit on a video's pixels if the checkpoint sets cap_pixels_per_frame, else None.
    """

    patch_px: int
    merge: int
    image_budget: PixelBudget
    video_budget: PixelBudget
    max_video_tokens: int | None
    frame_bounds: FrameBounds

    joins_parts: ClassVar[str | None] = None
    fixed_tokens: ClassVar[bool] = False
    template_options: ClassVar[Mapping[str, object]] = {}
    placeholders: ClassVar[Mapping[Modality, str]] = {
        Modality.IMAGE: "<|image_pad|>",
        Modality.VIDEO: "<|video_pad|>",
    }

    @classmethod
    def read(cls, checkpoint: Checkpoint, defaults: VideoDefaults, **own: Any) -> Self:
        """Reads the settings. own: fields of the subclass. Raises StartupError for unsupported or conflicting ones."""
        vision = checkpoint.config.get("vision_config", {})
        patch, merge = int(vision.get("patch_size", defaults.patch_px)), int(vision.get("spatial_merge_size", 2))
        temporal = int(vision.get("temporal_patch_size", 2))
        image = checkpoint.processor("image")
        video = checkpoint.processor("video") or image
        for name, settings in (("image", image), ("video", video)):
            _check(name, settings, {"patch_size": patch, "merge_size": merge, "temporal_patch_size": temporal})
        return cls(
            patch_px=patch,
            merge=merge,
            image_budget=_budget(image, patch * merge, _IMAGE_SIZE, old_names=True),
            video_budget=_budget(video, patch * merge, defaults.size, defaults.old_names),
            max_video_tokens=int(video.get("max_video_tokens") or defaults.max_tokens)
            if video.get("cap_pixels_per_frame")
            else None,
            frame_bounds=FrameBounds(
                fps=float(video.get("fps") or _FPS),
                min_frames=int(video.get("min_frames") or _MIN_FRAMES),
                max_frames=int(video.get("max_frames") or _MAX_FRAMES),
                temporal_patch=temporal,
            ),
            **own,
        )

    @property
    def pads(self) -> Mapping[Modality, str]:
        return self.placeholders

    @property
    def token_px(self) -> int:
        """Side of a merged token in pixels."""
        return self.patch_px * self.merge

    def image_size(self, height_px: int, width_px: int, wish: FrameSampling) -> tuple[int, int]:
        """Height and width of an image after resizing. Raises MediaRejected."""
        budget = self.image_budget
        return smart_resize(
            height_px, width_px, budget if wish.max_pixels is None else at_most(budget, wish.max_pixels)
        )

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """One frame, resized. Raises MediaRejected."""
        size = self.image_size(height_px, width_px, wish)
        if wish.max_pixels is not None:
            size = shrink_to(*size, self.token_px, wish.max_pixels)
        grid = self.grid(1, *size, Modality.IMAGE)
        return ImageLayout(FrameShape(1, size), (None,), grid, self.expansion(grid, None))

    def video_view(self, height_px: int, width_px: int, sent: tuple[int, int]) -> View | None:
        """Everything is sent."""
        return None

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """The expansion of an item's placeholder."""
        raise NotImplementedError

    def embedded_image(self, grid: Grid, tile_columns: int, index: int) -> Expansion:
        """As of pixels. Raises InvalidRequest for tiles."""
        check_untiled(tile_columns)
        return self.expansion(grid, None)

    def grid(self, frames: int, height_px: int, width_px: int, modality: Modality) -> Grid:
        """The grid of merged tokens of an item whose `frames` are sent at this size."""
        slices = 1 if modality is Modality.IMAGE else frames // self.frame_bounds.temporal_patch
        return Grid(slices, height_px // self.token_px, width_px // self.token_px)


def at_most(budget: PixelBudget, max_px: int) -> PixelBudget:
    """The budget with another maximum; its minimum is lowered to that if necessary."""
    return replace(budget, min_px=min(budget.min_px, max_px), max_px=max_px)


def _budget(settings: Mapping[str, Any], factor_px: int, defaults: Mapping[str, int], old_names: bool) -> PixelBudget:
    size = settings.get("size") or defaults
    old = settings if old_names else {}
    return PixelBudget(
        factor_px=factor_px,
        min_px=int(old.get("min_pixels") or size["shortest_edge"]),
        max_px=int(old.get("max_pixels") or size["longest_edge"]),
    )


def _check(name: str, settings: Mapping[str, Any], config: Mapping[str, int]) -> None:
    for key, value in config.items():
        if settings.get(key, value) != value:
            raise StartupError(f"the {name} processor's {key} is {settings[key]}, the model's is {value}")
    supported = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": _BICUBIC, "num_frames": None}
    for key, only in supported.items():
        if settings.get(key, only) != only:
            raise StartupError(f"the {name} processor's {key} is {settings[key]}, only {only} is supported")
