"""Cosmos 3 Edge: as Qwen3-VL, but each frame of a video is a slice, and the chat template's own vision markers around
a video are replaced together with its placeholder.

    template    <|vision_start|><|video_pad|><|vision_end|>
    expanded    <0.0 seconds><|vision_start|>(grid)<|vision_end|><0.5 seconds><|vision_start|>(grid)<|vision_end|>

Source: `Cosmos3EdgeProcessor` and its image and video processors of transformers 5.24.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import SizePx
from gridsieve.families.qwen.prompt import Qwen3VL
from gridsieve.services.preprocessing.layouts.qwen_vl import VideoDefaults, at_least_a_token
from gridsieve.services.preprocessing.video.sampling import FrameSampling

_DEFAULTS = VideoDefaults(
    patch_px=16,
    size={"shortest_edge": 64 * 64, "longest_edge": 24 * 1024 * 1024},
    max_tokens=0,
    old_names=(),
    image_size={"shortest_edge": 256 * 256, "longest_edge": 4096 * 4096},
    temporal_patch=1,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cosmos3Edge(Qwen3VL):
    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        return cls.read(checkpoint, _DEFAULTS, video_text="<|vision_start|><|video_pad|><|vision_end|>")

    def image_size(self, height_px: int, width_px: int, wish: FrameSampling) -> SizePx:
        grown = at_least_a_token(height_px, width_px, self.token_px)
        return super(Cosmos3Edge, self).image_size(*grown, wish)
