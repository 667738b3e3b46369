"""VideoLLaMA 3: an image has a token for each patch, a frame of a video one for each four, after its time.

A video's placeholder becomes `Time 0.0s:(tokens),Time 1.0s:(tokens)`. Positions are one-dimensional. Each frame has its
share of a video's pixel budget. The processor does not sample frames unless it is asked: here a video has one a second,
at most 180, as in training. What its `use_token_compression` would leave out, tokens that equal those of the frame
before, is left to pruning.
Source: `VideoLlama3Processor` and its image and video processors of transformers 5.24; arXiv 2501.13106.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.errors import StartupError
from framesieve.common.contract.plan import FrameShape, Grid, Modality, SizePx
from framesieve.services.preprocessing.families.qwen2_vl import Qwen2VL
from framesieve.services.preprocessing.layouts.family import Family
from framesieve.services.preprocessing.layouts.processors import check_processors
from framesieve.services.preprocessing.layouts.qwen_vl import at_most, budget_of
from framesieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from framesieve.services.preprocessing.prompt.positions import LinearSpan
from framesieve.services.preprocessing.video.resize import PixelBudget, shrink_to, smart_resize
from framesieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from framesieve.services.preprocessing.video.timing import TimeBase

_IMAGE_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}
_VIDEO_SIZE = {"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768}
_PATCH_PX, _MERGE = 16, 2
_FPS, _MIN_FRAMES, _MAX_FRAMES = 1.0, 4, 180


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLlama3(Family):
    """image_budget: of an image, in patches. video_budget: of all frames of a video."""

    image_budget: PixelBudget
    video_budget: PixelBudget

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> VideoLlama3:
        """Raises StartupError for settings that are not supported or contradict each other."""
        patch_px = checkpoint.config.part("vision_config").whole("patch_size", _PATCH_PX)
        image, video = checkpoint.processor("image"), checkpoint.processor("video")
        check_processors(checkpoint, temporal_patch_size=1, num_frames=None)
        _check("image", image, patch_size=patch_px, merge_size=1)
        _check("video", video, patch_size=patch_px, merge_size=_MERGE)
        names = checkpoint.read_json("tokenizer_config.json")
        return cls(
            placeholders={
                Modality.IMAGE: str(names.get("image_token", "<|image_pad|>")),
                Modality.VIDEO: str(names.get("video_token", "<|video_pad|>")),
            },
            token_px=_MERGE * patch_px,
            image_budget=budget_of(image, patch_px, _IMAGE_SIZE, old_names=True),
            video_budget=budget_of(video, _MERGE * patch_px, _VIDEO_SIZE, old_names=True),
            frame_bounds=FrameBounds(
                fps=video.number("fps", _FPS),
                min_frames=video.whole("min_frames", _MIN_FRAMES),
                max_frames=video.whole("max_frames", _MAX_FRAMES),
                temporal_patch=1,
            ),
        )

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """The indices of Qwen2-VL, whose formula this is."""
        return Qwen2VL.sample_indices(self, total_frames, average_rate, bounds)  # type: ignore[arg-type]

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """One frame, resized."""
        budget, side = self.image_budget, self.image_budget.factor_px
        size = smart_resize(height_px, width_px, at_most(budget, wish.max_pixels) if wish.max_pixels else budget)
        if wish.max_pixels is not None:
            size = shrink_to(*size, side, wish.max_pixels)
        grid = Grid(1, size[0] // side, size[1] // side)
        return ImageLayout(FrameShape(1, size), (None,), grid, self.expansion(grid, None))

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        """Height and width of each of a video's `frames` after resizing. Raises MediaRejected."""
        budget, share = self.video_budget, self.video_budget.max_px // frames
        wished = share if wish.max_pixels is None else min(share, wish.max_pixels)
        # The least number of pixels stays above a share that is smaller, as in transformers.
        least = budget.min_px if wish.max_pixels is None else min(budget.min_px, wish.max_pixels)
        return smart_resize(height_px, width_px, PixelBudget(budget.factor_px, least, wished))

    def video_grid(self, frames: int, height_px: int, width_px: int) -> Grid:
        """A slice for each frame."""
        return Grid(frames, height_px // self.token_px, width_px // self.token_px)

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """For each frame its time and its tokens; of an image its tokens."""
        if base is None:
            return (LinearSpan(grid.tokens),)
        one = LinearSpan(grid.slice_tokens)
        return tuple(
            part
            for number, seconds in enumerate(base.slices_s)
            for part in (f"{',' if number else ''}Time {seconds:.1f}s:", one)
        )


def _check(name: str, settings: Mapping[str, Any], **expected: int) -> None:
    for key, value in expected.items():
        if settings.get(key, value) != value:
            raise StartupError(f"the {name} processor's {key} is {settings[key]}, only {value} is supported")
