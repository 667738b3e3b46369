"""Qwen3-VL, 3.5, 3.6 and 3.8, dense and mixture of experts: each slice of a video is a grid, after its timestamp.

A video's placeholder becomes `<0.3 seconds><|vision_start|>(grid)<|vision_end|>` for each slice. The chat template's
own <|vision_start|> and <|vision_end|> stay around all of them, as in transformers 5.24; older versions dropped them.
All frames of a video share one pixel budget. Qwen3.5 and later models have no deepstack.
Source: `Qwen3VLVideoProcessor` and `Qwen3VLProcessor` of transformers 5.24, which gives them to Qwen3.5, too, and whose
`Qwen3_5Model.get_rope_index` is Qwen3-VL's; Qwen3-VL, arXiv 2511.21631.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Self

import numpy as np

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Grid, SizePx
from gridsieve.services.preprocessing.layouts.qwen_vl import QwenVL, VideoDefaults, at_least_a_token, at_most
from gridsieve.services.preprocessing.prompt.layout import Expansion
from gridsieve.services.preprocessing.prompt.positions import GridSpan
from gridsieve.services.preprocessing.video.resize import smart_resize
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

_DEFAULTS = VideoDefaults(
    patch_px=16,
    size={"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    max_tokens=768,
    old_names=("image",),
)
_DEEPSTACK_INDEXES = (8, 16, 24)
_WITHOUT_DEEPSTACK = ("qwen3_5", "qwen3_5_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VL(QwenVL):
    """embed_levels: the number of tower layers that feed deepstack."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Raises StartupError for settings that are not supported or contradict each other."""
        indexes = checkpoint.config.part("vision_config").get("deepstack_visual_indexes", _DEEPSTACK_INDEXES)
        levels = 0 if checkpoint.model_type in _WITHOUT_DEEPSTACK else len(indexes)
        return cls.read(checkpoint, _DEFAULTS, embed_levels=levels)

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """Evenly spaced indices from the first frame to the last. Their number may be odd."""
        wanted = int(total_frames / float(average_rate) * bounds.fps)
        frames = bounds.num_frames or min(max(wanted, bounds.min_frames), bounds.max_frames, total_frames)
        return tuple(np.linspace(0, total_frames - 1, frames).round().astype(int).tolist())

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        """Height and width of each of a video's `frames` after resizing. Raises MediaRejected.

        Fewer frames than a temporal patch count as a whole patch (transformers fails).
        """
        patch, side = self.frame_bounds.temporal_patch, self.token_px
        frames = max(frames, patch)
        budget = self.video_budget
        if self.max_video_tokens is not None:
            share = min(self.max_video_tokens * side**2, budget.max_px // frames)
            budget = replace(budget, max_px=max(share, int(budget.min_px * 1.05)) * frames)
        if wish.max_pixels is not None:
            budget = at_most(budget, min(budget.max_px, wish.max_pixels * frames))
        grown = at_least_a_token(height_px, width_px, side)
        return smart_resize(*grown, budget, frames, round(frames / patch) * patch)

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """For each slice its timestamp, and its grid between vision markers. For an image one grid alone."""
        one = GridSpan(Grid(1, grid.h, grid.w), Fraction(0))
        if base is None:
            return (one,)
        return tuple(
            part
            for seconds in base.slices_s
            for part in (f"<{seconds:.1f} seconds><|vision_start|>", one, "<|vision_end|>")
        )
