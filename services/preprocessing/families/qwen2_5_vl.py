"""Qwen2.5-VL: what it reads from its checkpoint, how it samples and resizes, and what its placeholders become.

Source: `Qwen2VLVideoProcessor`, `Qwen2VLImageProcessor` and `Qwen2_5_VLProcessor` of transformers 5.23; the time base
of Qwen2.5-VL, arXiv 2502.13923.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from common.checkpoint import Checkpoint
from common.errors import InvalidRequest, StartupError
from common.plan import Grid, Modality
from services.preprocessing.layout import MediaTokens
from services.preprocessing.positions import GridSpan
from services.preprocessing.resize import PixelBudget, smart_resize
from services.preprocessing.sampling import FrameBounds, FrameSampling

PLACEHOLDERS = {Modality.IMAGE: "<|image_pad|>", Modality.VIDEO: "<|video_pad|>"}
EMBED_LEVELS = 0

# The processors' own, for what a checkpoint leaves out. Its class says fps=None, the model was trained at 2.
_IMAGE_DEFAULTS = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
_VIDEO_DEFAULTS = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
_FPS, _MIN_FRAMES, _MAX_FRAMES = 2, 4, 768
_MAX_VIDEO_TOKENS = 128_000
_BICUBIC = 3


@dataclass(frozen=True, slots=True)
class Qwen25VL:
    """One checkpoint's settings.

    video_tokens: over all frames of a video, when the checkpoint caps them (cap_pixels_per_frame); else None.
    """

    patch_px: int
    merge: int
    tokens_per_second: Fraction
    image_budget: PixelBudget
    video_budget: PixelBudget
    video_tokens: int | None
    frame_bounds: FrameBounds

    placeholders = PLACEHOLDERS
    embed_levels = EMBED_LEVELS

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Qwen25VL:
        """Raises StartupError for settings that are not supported or contradict each other."""
        vision = checkpoint.config.get("vision_config", {})
        patch, merge = int(vision.get("patch_size", 14)), int(vision.get("spatial_merge_size", 2))
        temporal = int(vision.get("temporal_patch_size", 2))
        image = _processor(checkpoint, "image_processor", "preprocessor_config.json")
        video = _processor(checkpoint, "video_processor", "video_preprocessor_config.json") or image
        for name, settings in (("image", image), ("video", video)):
            _check(name, settings, {"patch_size": patch, "merge_size": merge, "temporal_patch_size": temporal})
        return cls(
            patch_px=patch,
            merge=merge,
            tokens_per_second=Fraction(str(vision.get("tokens_per_second", 4))),
            image_budget=_budget(image, patch * merge, _IMAGE_DEFAULTS),
            video_budget=_budget(video, patch * merge, _VIDEO_DEFAULTS),
            video_tokens=int(video.get("max_video_tokens") or _MAX_VIDEO_TOKENS)
            if video.get("cap_pixels_per_frame")
            else None,
            frame_bounds=FrameBounds(
                fps=float(video.get("fps") or _FPS),
                min_frames=int(video.get("min_frames") or _MIN_FRAMES),
                max_frames=int(video.get("max_frames") or _MAX_FRAMES),
                temporal_patch=temporal,
            ),
        )

    def image_size(self, height_px: int, width_px: int, wish: FrameSampling) -> tuple[int, int]:
        """Height and width of an image after resizing. Raises InvalidRequest, MediaRejected."""
        return smart_resize(height_px, width_px, self._wished(self.image_budget, wish))

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> tuple[int, int]:
        """Height and width of each of a video's `frames` after resizing. Raises InvalidRequest, MediaRejected."""
        budget = self._wished(self.video_budget, wish)
        if self.video_tokens is not None:
            total = int(self.video_tokens * budget.factor_px**2 * 0.9)
            share = total * self.frame_bounds.temporal_patch // frames
            budget = replace(budget, max_px=max(min(budget.max_px, share), int(budget.min_px * 1.05)))
        return smart_resize(height_px, width_px, budget)

    def grid(self, frames: int, height_px: int, width_px: int, modality: Modality) -> Grid:
        """Merged tokens of an item whose `frames` are sent at this size."""
        side = self.patch_px * self.merge
        slices = 1 if modality is Modality.IMAGE else frames // self.frame_bounds.temporal_patch
        return Grid(slices, height_px // side, width_px // side)

    def tokens(self, pad_id: int, grid: Grid, seconds_per_grid: Fraction | None) -> MediaTokens:
        """What a placeholder becomes: one grid, its slices as far apart as their time says (an image: 0)."""
        return MediaTokens(pad_id, (GridSpan(grid, (seconds_per_grid or Fraction(0)) * self.tokens_per_second),))

    def _wished(self, budget: PixelBudget, wish: FrameSampling) -> PixelBudget:
        if wish.max_pixels is None:
            return budget
        if wish.max_pixels < budget.factor_px**2:
            raise InvalidRequest(
                f"frame_sampling.max_pixels must be at least one token's {budget.factor_px**2}, got {wish.max_pixels}"
            )
        return replace(budget, min_px=min(budget.min_px, wish.max_pixels), max_px=wish.max_pixels)


def _processor(checkpoint: Checkpoint, nested: str, file: str) -> Mapping[str, Any]:
    """A processor's settings, where transformers looks for them, in its order."""
    own: Mapping[str, Any] = checkpoint.read_json("processor_config.json").get(nested) or checkpoint.read_json(file)
    return own


def _budget(settings: Mapping[str, Any], factor_px: int, defaults: Mapping[str, int]) -> PixelBudget:
    size = settings.get("size") or defaults
    return PixelBudget(
        factor_px=factor_px,
        min_px=int(settings.get("min_pixels") or size["shortest_edge"]),
        max_px=int(settings.get("max_pixels") or size["longest_edge"]),
    )


def _check(name: str, settings: Mapping[str, Any], config: Mapping[str, int]) -> None:
    for key, value in config.items():
        if settings.get(key, value) != value:
            raise StartupError(f"the {name} processor's {key} is {settings[key]}, the model's is {value}")
    supported = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": _BICUBIC, "num_frames": None}
    for key, only in supported.items():
        if settings.get(key, only) != only:
            raise StartupError(f"the {name} processor's {key} is {settings[key]}, only {only} is supported")
