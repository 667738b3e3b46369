"""Which model families there are, and what one must say. Adding a family adds a file and a line here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Protocol

from common.checkpoint import Checkpoint
from common.contract.plan import Grid, Modality
from services.preprocessing.families.qwen2_5_vl import Qwen25VL
from services.preprocessing.families.qwen3_vl import Qwen3VL
from services.preprocessing.prompt.layout import Expansion
from services.preprocessing.video.sampling import FrameBounds, FrameSampling
from services.preprocessing.video.timing import TimeBase


class Family(Protocol):
    """What differs between models when media are planned."""

    @property
    def placeholders(self) -> Mapping[Modality, str]:
        """The control token that stands for a media item in the chat template."""

    @property
    def embed_levels(self) -> int:
        """Tensors that a media token carries beside its embedding."""

    @property
    def frame_bounds(self) -> FrameBounds:
        """How densely videos are sampled where the request does not say."""

    @property
    def token_px(self) -> int:
        """Side in pixels of what becomes one token; sides after resizing are multiples of it."""

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """Which of so many frames are looked at: indices below `total_frames`, not decreasing, at least one."""

    def image_size(self, height_px: int, width_px: int, wish: FrameSampling) -> tuple[int, int]:
        """Height and width after resizing."""

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> tuple[int, int]:
        """Height and width of each of `frames` after resizing."""

    def grid(self, frames: int, height_px: int, width_px: int, modality: Modality) -> Grid:
        """Merged tokens of an item whose `frames` are sent at this size."""

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """What the item's placeholder becomes. base: a video's; None for an image."""


FAMILIES: Mapping[str, Callable[[Checkpoint], Family]] = {
    "qwen2_5_vl": Qwen25VL.from_checkpoint,
    "qwen3_vl": Qwen3VL.from_checkpoint,
    "qwen3_vl_moe": Qwen3VL.from_checkpoint,
}


def load_family(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint. Raises StartupError for one that is not supported."""
    return checkpoint.pick(FAMILIES)(checkpoint)
