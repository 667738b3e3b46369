"""The model families, and the interface that each implements. A new family is a file and a line in FAMILIES."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Protocol

from framesieve.common.checkpoint import Checkpoint
from framesieve.common.contract.plan import Grid, Modality
from framesieve.services.preprocessing.families.internvl import InternVL
from framesieve.services.preprocessing.families.llava import Llava
from framesieve.services.preprocessing.families.llava_next_video import LlavaNextVideo
from framesieve.services.preprocessing.families.llava_onevision import LlavaOnevision
from framesieve.services.preprocessing.families.minicpmv import MiniCPMV
from framesieve.services.preprocessing.families.qwen2_5_vl import Qwen25VL
from framesieve.services.preprocessing.families.qwen2_vl import Qwen2VL
from framesieve.services.preprocessing.families.qwen3_vl import Qwen3VL
from framesieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from framesieve.services.preprocessing.video.resize import View
from framesieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from framesieve.services.preprocessing.video.timing import TimeBase


class Family(Protocol):
    """The parts of planning that differ between models."""

    @property
    def placeholders(self) -> Mapping[Modality, str]:
        """The control token of a media item in the chat template, by modality; of those that the model knows."""

    @property
    def pads(self) -> Mapping[Modality, str]:
        """The token of each of an item's tokens, by modality."""

    @property
    def embed_levels(self) -> int:
        """Tensors that each media token has besides its embedding."""

    @property
    def fixed_tokens(self) -> bool:
        """Whether the tokens of a frame are not in proportion to its pixels."""

    @property
    def frame_bounds(self) -> FrameBounds:
        """The checkpoint's defaults for sampling frames."""

    @property
    def token_px(self) -> int:
        """Side in pixels of the square that becomes one token; sides after resizing are multiples of it."""

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """The sampled frames: indices below `total_frames`, not decreasing, at least one.

        Where the rate of a video varies, it is called again for as many frames of a video that has many more: they
        then say how frames are spread over time.
        """

    @property
    def joins_parts(self) -> str | None:
        """What is between the parts of a message, for chat templates that take text alone; None: others."""

    @property
    def template_options(self) -> Mapping[str, object]:
        """Variables of the chat template besides the messages."""

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """The layout of a picture of this size, the image `index` of so many `images` in the prompt."""

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> tuple[int, int]:
        """Height and width of each of `frames` after resizing."""

    def video_view(self, height_px: int, width_px: int, sent: tuple[int, int]) -> View | None:
        """What is sent of a video's frames of this size, where the sent size is this; None: all of them."""

    def grid(self, frames: int, height_px: int, width_px: int, modality: Modality) -> Grid:
        """The grid of merged tokens of an item whose `frames`, or groups of frames, are sent at this size."""

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """The expansion of the placeholder of a video, or of its embeddings. base: of a video; None for an image.

        Raises InvalidRequest for a grid that no video has.
        """

    def embedded_image(self, grid: Grid, tile_columns: int, index: int) -> Expansion:
        """The expansion of the embeddings of an image, the image `index` of the prompt.

        tile_columns: of its tiles; 0 without. Raises InvalidRequest for a grid or tiles that no image has.
        """


FAMILIES: Mapping[str, Callable[[Checkpoint], Family]] = {
    "internvl": InternVL.from_checkpoint,
    "llava": Llava.from_checkpoint,
    "llava_next_video": LlavaNextVideo.from_checkpoint,
    "llava_onevision": LlavaOnevision.from_checkpoint,
    "minicpmv": MiniCPMV.from_checkpoint,
    "mistral3": Llava.from_checkpoint,
    "qwen2_vl": Qwen2VL.from_checkpoint,
    "qwen2_5_vl": Qwen25VL.from_checkpoint,
    "qwen3_vl": Qwen3VL.from_checkpoint,
    "qwen3_vl_moe": Qwen3VL.from_checkpoint,
}


def load_family(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint. Raises StartupError for one that is not supported."""
    return checkpoint.pick(FAMILIES)(checkpoint)
