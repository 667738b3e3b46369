"""Qwen's prompts.

    Qwen2-VL      a video is one grid, whose slices are one position apart; the pixel budget applies to each frame
    Qwen2.5-VL    the time between slices determines their distance in positions
    Qwen2.5-Omni  as Qwen2.5-VL, and sounds: of a video, pictures and sound take turns every two seconds
    Qwen3-VL      also 3.5, 3.6, 3.8, dense and mixture of experts: each slice is a grid, after its timestamp
    Qwen3-Omni    as Qwen2.5-VL, with Qwen3-VL's patches; of a video with its sound, each slice is before the token of
                  the sound of its time

Of Qwen3-VL a video's placeholder becomes `<0.3 seconds><|vision_start|>(grid)<|vision_end|>` for each slice. The chat
template's own <|vision_start|> and <|vision_end|> stay around all of them, as in transformers 5.24; older versions
dropped them. All frames of a video share one pixel budget. Qwen3.5 and later models have no deepstack.
Source: `Qwen2VLVideoProcessor`, index for index, `Qwen2_5_VLProcessor`, `Qwen2_5OmniProcessor`, `Qwen3VLVideoProcessor`
and `Qwen3VLProcessor` of transformers 5.24, which gives these two to Qwen3.5, too, and whose
`Qwen3_5Model.get_rope_index` is Qwen3-VL's;
Qwen2-VL, arXiv 2409.12191; Qwen2.5-VL, arXiv 2502.13923; Qwen2.5-Omni, arXiv 2503.20215; Qwen3-VL, arXiv 2511.21631.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Self

import numpy as np

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import MAX_FRAME_SIDE_PX, Grid, Modality, SizePx
from gridsieve.families.parts.sampling import count_of, from_first_to_last
from gridsieve.services.preprocessing.layouts.qwen_vl import (
    PLACEHOLDERS,
    QwenVL,
    VideoDefaults,
    at_least_a_token,
    at_most,
    by_slice,
)
from gridsieve.services.preprocessing.prompt.layout import Expansion, SharedToken
from gridsieve.services.preprocessing.prompt.positions import GridSpan, LinearSpan, clip_parts, slice_parts
from gridsieve.services.preprocessing.sound.features import LogMel
from gridsieve.services.preprocessing.video.resize import PixelBudget, smart_resize
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

_DEFAULTS = VideoDefaults(
    patch_px=14,
    size={"shortest_edge": 128 * 28 * 28, "longest_edge": 28 * 28 * 768},
    max_tokens=128_000,
    old_names=("image", "video"),
)
_LANES = 8
_TOKENS_PER_SECOND = 4
# Of videos, the processor's class has a size of its own, whatever preprocessor_config.json says of images.
_DEFAULTS_OF_2_5_OMNI = replace(_DEFAULTS, sized_as_images=False)
_PLACEHOLDERS_OF_OMNI: Mapping[Modality, str] = {
    Modality.IMAGE: "<|IMAGE|>",
    Modality.VIDEO: "<|VIDEO|>",
    Modality.AUDIO: "<|AUDIO|>",
}
_POSITIONS_PER_SECOND, _OMNI_CHUNK_S = 25, 2
_DEFAULTS_OF_3 = VideoDefaults(
    patch_px=16,
    size={"shortest_edge": 128 * 32 * 32, "longest_edge": 32 * 32 * 768},
    max_tokens=768,
    old_names=("image",),
)
_DEFAULTS_OF_OMNI = VideoDefaults(
    patch_px=16,
    size={"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
    max_tokens=128_000,
    old_names=("image", "video"),
    sized_as_images=False,
)
# Of half a chunk, in frames.
_SOUND_WINDOW = 50
# Of Qwen3-VL-Embedding and -Reranker, in tokens: of an image, and of each frame of a video.
_RETRIEVED_IMAGE, _RETRIEVED_FRAME = (4, 1800), (128, 768)
_DEEPSTACK_INDEXES = (8, 16, 24)
_WITHOUT_DEEPSTACK = ("qwen3_5", "qwen3_5_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2VL(QwenVL):
    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        return cls.read(checkpoint, _DEFAULTS)

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """The indices of transformers, sometimes an odd number of them.

        Two deviations: a video too short for one temporal patch yields its first frame (transformers divides by zero),
        and an index that rounding puts after the last frame is left out (transformers fails).
        """
        patch = bounds.temporal_patch
        if bounds.num_frames is not None:
            frames = round(bounds.num_frames / patch) * patch
        else:
            max_frames = min(bounds.max_frames, total_frames) // patch * patch
            wanted = total_frames / float(average_rate) * bounds.fps
            frames = math.floor(min(max(wanted, bounds.min_frames), max_frames, total_frames) / patch) * patch
        if frames == 0:
            return (0,)
        step = total_frames / frames
        return tuple(index for index in _torch_arange(total_frames, step) if index < total_frames)

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        budget = self.video_budget if wish.max_pixels is None else at_most(self.video_budget, wish.max_pixels)
        if self.max_video_tokens is not None:
            total = int(self.max_video_tokens * budget.factor_px**2 * 0.9)
            share = total * self.frame_bounds.temporal_patch // frames
            budget = replace(budget, max_px=max(min(budget.max_px, share), int(budget.min_px * 1.05)))
        return smart_resize(height_px, width_px, budget)

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """One grid."""
        return (GridSpan(grid, Fraction(1)),)


def _torch_arange(end: int, step: float) -> list[int]:
    """Reproduces `torch.arange(0, end, step).int()`, rounding for rounding.

    torch computes in pairs of lanes of 8 elements: it rounds the first element of each lane to float32, derives the
    others from it in float64, and rounds them; elements that fill no pair are computed one by one. The result may have
    one element more than end / step, which may be `end` itself.
    """
    count = math.ceil(end / step)
    index = np.arange(count)
    lane = (index // _LANES * _LANES * step).astype(np.float32).astype(np.float64) + index % _LANES * step
    values = np.where(index < count // (2 * _LANES) * 2 * _LANES, lane, index * step).astype(np.float32)
    return [int(value) for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25VL(Qwen2VL):
    """tokens_per_second: positions for each second of video."""

    tokens_per_second: Fraction

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        per_second = checkpoint.config.part("vision_config").number("tokens_per_second", _TOKENS_PER_SECOND)
        return cls.read(checkpoint, _DEFAULTS, tokens_per_second=Fraction(str(per_second)))

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """One grid. Its time step is tokens_per_second · seconds_per_grid, 0 for an image; by time, each slice is at
        ⌊tokens_per_second · its first frame's time⌋, from the first one."""
        if base and base.starts_s:
            places = [math.floor(self.tokens_per_second * start_s) for start_s in base.starts_s]
            return (GridSpan(grid, Fraction(0), tuple(place - places[0] for place in places)),)
        return (GridSpan(grid, self.tokens_per_second * base.seconds_per_grid if base else Fraction(0)),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25Omni(Qwen25VL):
    """chunk: positions in time after which pictures and sound of a video take turns."""

    chunk: int

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        per_second = Fraction(str(checkpoint.config.number("position_id_per_seconds", _POSITIONS_PER_SECOND)))
        chunk_s = Fraction(str(checkpoint.config.number("seconds_per_chunk", _OMNI_CHUNK_S)))
        return cls.read(
            checkpoint,
            _DEFAULTS_OF_2_5_OMNI,
            placeholders=_PLACEHOLDERS_OF_OMNI,
            tokens_per_second=per_second,
            chunk=math.floor(per_second * chunk_s),
            log_mel=LogMel.from_checkpoint(checkpoint),
        )

    def sound_tokens(self, frames: int) -> int:
        """Of four frames one; two convolutions and a mean of two rows make it."""
        return (frames + 1) // 2 // 2

    def clip(self, grid: Grid, base: TimeBase, tokens: int) -> Expansion:
        """The template's own <|vision_bos|> and <|vision_eos|> are around it, and have the positions of its own two."""
        pictures = GridSpan(grid, self.tokens_per_second * base.seconds_per_grid)
        return (
            SharedToken("<|audio_bos|>", before=True),
            *clip_parts(pictures, LinearSpan(tokens), self.chunk),
            SharedToken("<|audio_eos|>", before=False),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Omni(Qwen25VL):
    """sound_chunk: frames of a sound that the convolutions see at once."""

    sound_chunk: int

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Self:
        """Videos have the size of their own processor, not of the image processor, or else that of its class."""
        per_second = checkpoint.config.number("position_id_per_seconds", _POSITIONS_PER_SECOND)
        log_mel = LogMel.from_checkpoint(checkpoint, padded=False)
        return cls.read(
            checkpoint,
            _DEFAULTS_OF_OMNI,
            placeholders={**PLACEHOLDERS, Modality.AUDIO: "<|audio_pad|>"},
            tokens_per_second=Fraction(str(per_second)),
            embed_levels=len(_deepstack_indexes(checkpoint)),
            # The model takes any length; a frame of a plan has this many columns at most.
            log_mel=replace(log_mel, max_samples=MAX_FRAME_SIDE_PX * log_mel.hop),
            sound_chunk=2 * checkpoint.config.part("audio_config").whole("n_window", _SOUND_WINDOW),
        )

    def sound_tokens(self, frames: int) -> int:
        """Of eight frames one, rounded up in each chunk; three convolutions make it."""
        chunks, rest = divmod(frames, self.sound_chunk)
        return chunks * -(-self.sound_chunk // 8) + -(-rest // 8)

    def clip(self, grid: Grid, base: TimeBase, tokens: int) -> Expansion:
        """The template's own <|vision_start|> and <|vision_end|> are around it."""
        pictures = GridSpan(grid, self.tokens_per_second * base.seconds_per_grid)
        return ("<|audio_start|>", *slice_parts(pictures, LinearSpan(tokens)), "<|audio_end|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VL(QwenVL):
    """embed_levels: the number of tower layers that feed deepstack."""

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Qwen3VL:
        """Of an embedder or a reranker, with frames and sizes of their own."""
        levels = 0 if checkpoint.model_type in _WITHOUT_DEEPSTACK else len(_deepstack_indexes(checkpoint))
        made = cls.read(checkpoint, _DEFAULTS_OF_3, embed_levels=levels)
        return made if checkpoint.task == "generate" else _for_retrieval(made)

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """Evenly spaced indices from the first frame to the last. Their number may be odd."""
        return from_first_to_last(total_frames, count_of(total_frames, average_rate, bounds))

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
        """For each slice its timestamp, and its grid between vision markers."""
        return by_slice(grid, base, lambda s: (f"<{s:.1f} seconds><|vision_start|>", "<|vision_end|>"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLRetrieval(Qwen3VL):
    """Qwen3-VL-Embedding and -Reranker, whose published scripts choose frames and sizes, and not their processors.

    Source: the scripts of QwenLM/Qwen3-VL-Embedding, and `smart_nframes` and `fetch_video` of qwen-vl-utils.
    """

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """An even number of evenly spaced indices from the first frame to the last; of one frame the first."""
        patch = bounds.temporal_patch
        wanted = bounds.num_frames or total_frames / float(average_rate) * bounds.fps
        if bounds.num_frames is None:
            wanted = min(max(wanted, bounds.min_frames), bounds.max_frames)
        frames = math.floor(min(wanted, total_frames) / patch) * patch
        return _torch_linspace(total_frames - 1, frames) if frames else (0,)

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        """Each frame has a budget of its own, and small ones are enlarged."""
        budget = self.video_budget if wish.max_pixels is None else at_most(self.video_budget, wish.max_pixels)
        return smart_resize(height_px, width_px, budget)


def _deepstack_indexes(checkpoint: Checkpoint) -> Sequence[int]:
    """The tower's layers that feed deepstack."""
    indexes: Sequence[int] = checkpoint.config.part("vision_config").get("deepstack_visual_indexes", _DEEPSTACK_INDEXES)
    return indexes


def _torch_linspace(end: int, count: int) -> tuple[int, ...]:
    """Reproduces `torch.linspace(0, end, count).round()`, which counts from both ends in float32."""
    index, step = np.arange(count, dtype=np.float32), np.float32(end) / np.float32(count - 1)
    values = np.where(index < count // 2, step * index, np.float32(end) - step * (np.float32(count - 1) - index))
    return tuple(values.round().astype(int).tolist())


def _for_retrieval(family: Qwen3VL) -> Qwen3VLRetrieval:
    """The family with the frames and sizes of the published scripts, whatever the checkpoint's processors say."""
    own = {each.name: getattr(family, each.name) for each in fields(family)}
    image, frame = (
        PixelBudget(family.token_px, least * family.token_px**2, most * family.token_px**2)
        for least, most in (_RETRIEVED_IMAGE, _RETRIEVED_FRAME)
    )
    bounds = replace(family.frame_bounds, fps=1.0, min_frames=4, max_frames=64)
    return Qwen3VLRetrieval(**own | {"image_budget": image, "video_budget": frame, "frame_bounds": bounds})
