"""VideoLLaMA 3: an image has a token for each patch, a frame of a video one for each four, after its time.

A video's placeholder becomes `Time 0.0s:(tokens),Time 1.0s:(tokens)`. Positions are one-dimensional. Each frame has its
share of a video's pixel budget. The processor does not sample frames unless it is asked: here a video has one a second,
at most 180, as in training. What its `use_token_compression` would leave out, tokens that equal those of the frame
before, is left to pruning.
Source: `VideoLlama3Processor` and its image and video processors of transformers 5.24; arXiv 2501.13106.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid, SizePx
from gridsieve.families.qwen.prompt import Qwen2VL
from gridsieve.services.preprocessing.layouts.qwen_vl import PLACEHOLDERS, VideoDefaults
from gridsieve.services.preprocessing.prompt.control_tokens import named_tokens
from gridsieve.services.preprocessing.prompt.layout import Expansion
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.video.resize import PixelBudget, smart_resize
from gridsieve.services.preprocessing.video.sampling import FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

_DEFAULTS = VideoDefaults(
    patch_px=16,
    size={"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    max_tokens=0,
    old_names=("image", "video"),
    temporal_patch=1,
    image_merge=1,
    fps=1.0,
    max_frames=180,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoLlama3(Qwen2VL):
    """The settings of one checkpoint. video_budget: of all frames of a video."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        names = named_tokens(checkpoint)
        placeholders = {kind: names.get(f"{kind.value}_token", token) for kind, token in PLACEHOLDERS.items()}
        return cls.read(checkpoint, _DEFAULTS, placeholders=placeholders)

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        budget, share = self.video_budget, self.video_budget.max_px // frames
        wished = share if wish.max_pixels is None else min(share, wish.max_pixels)
        # The least number of pixels stays above a share that is smaller, as in transformers.
        least = budget.min_px if wish.max_pixels is None else min(budget.min_px, wish.max_pixels)
        return smart_resize(height_px, width_px, PixelBudget(budget.factor_px, least, wished))

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
