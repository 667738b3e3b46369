"""The interface of a model family: the parts of planning a prompt that differ between models."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Grid, Modality, SizePx
from gridsieve.common.contract.tensors import DType
from gridsieve.families import family_of
from gridsieve.services.preprocessing.prompt.layout import Expansion, ImageLayout, SharedToken
from gridsieve.services.preprocessing.prompt.positions import LinearSpan
from gridsieve.services.preprocessing.prompt.tokens import PromptTexts
from gridsieve.services.preprocessing.sound.features import MelFeatures
from gridsieve.services.preprocessing.video.resize import View
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

# Height and width of a picture that a family which slices pictures slices.
_SLICED_PX = (1024, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(PromptTexts, ABC):
    """The settings of one checkpoint. Reading them raises StartupError for those that are not supported or contradict
    each other.

    token_px: side in pixels of the square that becomes one token; sides of resized frames are multiples of it.
    frame_bounds: the checkpoint's defaults for sampling frames.
    timed_by_first: whether the time of a slice is that of its first frame, and not the middle of its frames'.
    embed_levels: tensors that each media token has besides its embedding.
    frame_dtype: of frames as they are sent: float32 where the processor does not round them after resizing.
    takes_max_slices: whether a request may say how many slices a picture has.
    fixed_tokens: whether the tokens of a frame are not in proportion to its pixels.
    canvas_markers: of `canvas_positions`, where the spans of expansions are those of canvases.
    log_mel: the features of sounds; None: the model takes no sounds.
    """

    token_px: int
    frame_bounds: FrameBounds
    timed_by_first: bool = False
    embed_levels: int = 0
    frame_dtype: DType = DType.UINT8
    takes_max_slices: bool = False
    fixed_tokens: bool = False
    canvas_markers: tuple[int, ...] = ()
    log_mel: MelFeatures | None = None

    @abstractmethod
    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """The layout of a picture of this size, the image `index` of so many `images` in the prompt.

        Raises MediaRejected for an aspect ratio above 200, InvalidRequest for a wish that the family cannot fulfil.
        """

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """The sampled frames of a video: indices below `total_frames`, not decreasing, at least one.

        Where the rate of a video varies, it is called again for as many frames of a video that lasts as long and has
        many more: they then say how frames are spread over time.
        """
        raise NotImplementedError

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        """Height and width of each of a video's `frames` after resizing. Raises as `image`."""
        raise NotImplementedError

    def video_view(self, height_px: int, width_px: int, sent_px: SizePx) -> View | None:
        """The part of a video's frames that is sent, and how it is resized to `sent_px`; None: the whole frame."""
        return None

    def video_grid(self, frames: int, height_px: int, width_px: int) -> Grid:
        """The grid of merged tokens of a video whose `frames`, or groups of frames, are sent at this size."""
        raise NotImplementedError

    def sliced_video(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> ImageLayout | None:
        """The layout of a video each of whose `frames` is sent as a whole and slices; None: as a whole alone.

        Raises as `image`.
        """
        return None

    @property
    def markers(self) -> list[str]:
        wish, slices = FrameSampling(), self.frame_bounds.temporal_patch
        parts = self.image(*_SLICED_PX, wish, 0, 1).expansion
        if Modality.VIDEO in self.placeholders:
            grid = self.video_grid(slices, *self.video_size(*_SLICED_PX, slices, wish))
            base = TimeBase.of_step(Fraction(1), grid.t, slices)
            parts += self.expansion(grid, base)
            if self.log_mel:
                parts += self.clip(grid, base, 1)
        texts = (part.text if isinstance(part, SharedToken) else part for part in parts)
        return [text for text in texts if isinstance(text, str)]

    @staticmethod
    def fixed_size(size_px: SizePx, wish: FrameSampling) -> SizePx:
        """`size_px`, for families whose frames all have this size. Raises InvalidRequest if fewer pixels are wished."""
        if wish.max_pixels is not None and wish.max_pixels < (pixels := math.prod(size_px)):
            limit = f"at least {pixels}, which this model's frames always have"
            raise InvalidRequest(field="frame_sampling.max_pixels", limit=limit, value=wish.max_pixels)
        return size_px

    @abstractmethod
    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """The expansion of the placeholder of a video, or of its embeddings. base: of a video; None for an image.

        Raises InvalidRequest for a grid that no video has.
        """

    def sound_tokens(self, frames: int) -> int:
        """How many tokens a sound becomes whose features have so many frames; 0: it is too short."""
        raise NotImplementedError

    def sound(self, tokens: int) -> Expansion:
        """The expansion of the placeholder of a sound by itself."""
        return (LinearSpan(tokens),)

    def clip(self, grid: Grid, base: TimeBase, tokens: int) -> Expansion:
        """The expansion of the placeholder of a video with its sound, of so many `tokens`."""
        raise NotImplementedError

    def embedded_image(self, grid: Grid, tile_columns: int, index: int) -> Expansion:
        """The expansion of the embeddings of an image, the image `index` of the prompt.

        tile_columns: of its tiles; 0 without. Raises InvalidRequest for a grid or tiles that no image has.
        """
        if tile_columns:
            raise InvalidRequest(field="embeds.tile_columns", limit="0 for this model", value=tile_columns)
        return self.expansion(grid, None)


def load_family(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint, of the module that `gridsieve.families` names.

    Raises StartupError for a model type or settings that are not supported.
    """
    family: Family = family_of(checkpoint).load("prompt")(checkpoint)
    return family
