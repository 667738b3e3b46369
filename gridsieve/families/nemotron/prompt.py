"""Nemotron 3 Nano Omni: an image at a resolution of its own; a video as tubelets of two frames, after their times; a
sound as one row of tokens.

    an image    <img>, a token for each 2 × 2 patches, </img>
    a video     Frame 1 sampled at 0.00 seconds and frame 2 sampled at 0.50 seconds: <img>, tokens, </img>, newline,
                Frame 3 sampled at 1.00 seconds: …                          the last tubelet may have one frame
    a sound     <so_start>, a token for each 8 frames of its features, <so_end>

The time of a frame is its number times the whole milliseconds that a frame of the video lasts; where the rate varies,
it is when the frame is shown. The chat template writes <video>, which the vocabulary lacks; tokens of videos are those
of images. Frames are not rounded after resizing. Positions are one-dimensional, and the model's attention reads none.
The processor has no video with its sound: here this is the video, and the sound after it, as of a prompt that has both.
The processor does not sample frames unless it is asked: here a video has two a second, at most 128, as NVIDIA serves
its vision models, each the first of its share, as the processor's own sampling has them.
Source: `NemotronH_Omni_Reasoning_V3Processor` and its image and video processors of transformers 5.24.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import FrameShape, Grid, Modality, SizePx
from gridsieve.common.contract.tensors import DType
from gridsieve.families.parts.sampling import count_of, firsts_of_shares
from gridsieve.services.preprocessing.layouts.family import Family
from gridsieve.services.preprocessing.layouts.processors import check_processors
from gridsieve.services.preprocessing.prompt.control_tokens import named_tokens
from gridsieve.services.preprocessing.prompt.layout import Expansion, ImageLayout
from gridsieve.services.preprocessing.prompt.positions import LinearSpan, PartSpan
from gridsieve.services.preprocessing.sound.features import ParakeetMel
from gridsieve.services.preprocessing.video.resize import check_aspect, shrink_to
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from gridsieve.services.preprocessing.video.timing import TimeBase

_FPS, _MAX_FRAMES = 2.0, 128
# Of transformers' classes.
_PATCH_PX, _DOWNSAMPLE_RATIO = 16, 0.5
_MIN_PATCHES, _MAX_PATCHES, _MAX_MODEL_LEN = 1024, 13312, 16384
_SUBSAMPLING, _MAX_SOUND_TOKENS = 8, 5000
_SOUND_START, _SOUND_END = "<so_start>", "<so_end>"
# Of the context, what the processor leaves to text.
_TEXT_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHOmni(Family):
    """patch_px: side of a patch. start, end: the tokens around those of an image or a tubelet.

    image_patches: the fewest and the most of an image; no most: 0. model_tokens: the context that images share.
    video_patches: of a frame of a video. keeps_shape: whether that has the video's shape, or is a square.
    subsampling: frames of features that become a token of a sound.
    """

    patch_px: int
    start: str
    end: str
    image_patches: tuple[int, int]
    model_tokens: int
    video_patches: int
    keeps_shape: bool
    subsampling: int

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> NemotronHOmni:
        image = checkpoint.processor("image")
        video = checkpoint.processor("video") or image
        patch_px, ratio = image.whole("patch_size", _PATCH_PX), image.number("downsample_ratio", _DOWNSAMPLE_RATIO)
        check_processors(checkpoint, patch_size=patch_px, downsample_ratio=ratio, num_frames=None)
        names = named_tokens(checkpoint)
        token = names.get("image_token", "<image>")
        placeholders = {Modality.IMAGE: token, Modality.VIDEO: names.get("video_token", "<video>")}
        tower = checkpoint.config.part("audio_config") or checkpoint.config.part("sound_config")
        subsampling, log_mel = tower.whole("subsampling_factor", _SUBSAMPLING), None
        if tower:
            placeholders[Modality.AUDIO] = names.get("audio_token", "<so_embedding>")
            most_tokens = tower.whole("max_position_embeddings", _MAX_SOUND_TOKENS)
            log_mel = ParakeetMel.from_checkpoint(checkpoint, most_tokens * subsampling)
        return cls(
            placeholders=placeholders,
            log_mel=log_mel,
            subsampling=subsampling,
            pad=token,
            token_px=round(1 / ratio) * patch_px,
            frame_bounds=FrameBounds(
                fps=video.number("fps", _FPS),
                min_frames=1,
                max_frames=_MAX_FRAMES,
                temporal_patch=checkpoint.config.whole("video_temporal_patch_size", 2),
            ),
            timed_by_first=True,
            frame_dtype=DType.FLOAT32,
            patch_px=patch_px,
            start=names.get("image_start_token", "<img>"),
            end=names.get("image_end_token", "</img>"),
            image_patches=(
                image.whole("min_num_patches", _MIN_PATCHES),
                image.whole("max_num_patches", _MAX_PATCHES, least=0),
            ),
            model_tokens=image.whole("max_model_len", _MAX_MODEL_LEN),
            video_patches=video.whole("video_target_num_patches", 1024),
            keeps_shape=bool(video.get("video_maintain_aspect_ratio", True)),
        )

    @property
    def _merge(self) -> int:
        return self.token_px // self.patch_px

    def sample_indices(self, total_frames: int, average_rate: Fraction, bounds: FrameBounds) -> tuple[int, ...]:
        """The first of each of evenly divided shares."""
        return firsts_of_shares(total_frames, count_of(total_frames, average_rate, bounds))

    def image(self, height_px: int, width_px: int, wish: FrameSampling, index: int, images: int) -> ImageLayout:
        """One frame, near the picture's own size."""
        check_aspect(height_px, width_px)
        least, most = self.image_patches
        budget = max((self.model_tokens - _TEXT_TOKENS) * self._merge**2, least * images)
        budget = max(min(budget, most) if most else budget, least)
        if wish.max_pixels is not None:
            budget = min(budget, wish.max_pixels // self.patch_px**2)
        rows, columns = self._picture_patches(height_px, width_px, least, budget)
        size = rows * self.patch_px, columns * self.patch_px
        if wish.max_pixels is not None:
            size = shrink_to(*size, self.token_px, wish.max_pixels)
        grid = self.video_grid(1, *size)
        return ImageLayout(FrameShape(1, size), (None,), grid, self.expansion(grid, None))

    def video_size(self, height_px: int, width_px: int, frames: int, wish: FrameSampling) -> SizePx:
        """Height and width of every frame: near the number of patches that each has. Raises MediaRejected."""
        check_aspect(height_px, width_px)
        patches = self.video_patches
        if wish.max_pixels is not None:
            patches = min(patches, wish.max_pixels // self.patch_px**2)
        rows, columns = self._frame_patches(width_px / height_px, patches)
        return rows * self.patch_px, columns * self.patch_px

    def video_grid(self, frames: int, height_px: int, width_px: int) -> Grid:
        """A slice for each tubelet."""
        tubelets = -(-frames // self.frame_bounds.temporal_patch)
        return Grid(tubelets, height_px // self.token_px, width_px // self.token_px)

    def expansion(self, grid: Grid, base: TimeBase | None) -> Expansion:
        """For each tubelet the times of its frames and its tokens; of an image its tokens."""
        return timed_slices(grid, base, self.frame_bounds.temporal_patch, self.start, self.end)

    def sound_tokens(self, frames: int) -> int:
        """Each convolution of the tower halves them."""
        return -(-frames // self.subsampling)

    def sound(self, tokens: int) -> Expansion:
        return (_SOUND_START, LinearSpan(tokens), _SOUND_END)

    def clip(self, grid: Grid, base: TimeBase, tokens: int) -> Expansion:
        """The video, then its sound, whose positions follow."""
        sound = PartSpan(LinearSpan(tokens), 0, tokens, begins=True)
        return (*self.expansion(grid, base), _SOUND_START, sound, _SOUND_END)

    def _picture_patches(self, height_px: int, width_px: int, least: int, most: int) -> tuple[int, int]:
        """Rows and columns of patches that cover a picture, scaled into the limits and rounded to whole tokens."""
        sides = [round(side / self.patch_px + 0.5) for side in (height_px, width_px)]
        shrink = min(math.sqrt(most / math.prod(sides)), 1.0)
        sides = [max(math.floor(shrink * side), 1) for side in sides]
        if most > least > math.prod(sides):
            grow = math.sqrt(least / math.prod(sides))
            sides = [math.ceil(grow * side) for side in sides]
        for axis in (0, 1):  # columns are rounded once rows are
            down, up = (_multiple(sides[axis], self._merge, up=up) for up in (False, True))
            sides[axis] = up if up * sides[1 - axis] <= most else max(self._merge, down)
        return sides[0], sides[1]

    def _frame_patches(self, aspect: float, wanted: int) -> tuple[int, int]:
        """Rows and columns of a frame: about as many patches as wanted, as whole tokens. aspect: width / height."""
        merge = self._merge
        if not self.keeps_shape:
            side = max(merge, _multiple(int(math.sqrt(wanted)), merge, up=False))
            return side, side
        sides = [max(round(math.sqrt(wanted / aspect)), 1), max(round(math.sqrt(wanted * aspect)), 1)]
        up = [_multiple(side, merge, up=True) for side in sides]
        if math.prod(up) <= wanted:
            return up[0], up[1]
        rows, columns = (max(merge, _multiple(side, merge, up=False)) for side in sides)
        return rows, columns


def timed_slices(grid: Grid, base: TimeBase | None, each: int, start: str, end: str) -> Expansion:
    """The slices of a video, each after the times of its frames; of an image its tokens. each: frames of a slice, whose
    last may have fewer.

    start, end: the tokens around those of a slice.
    """
    one = LinearSpan(grid.slice_tokens)
    if base is None:
        return (start, one, end)
    labels = [
        f"{'frame' if number % each else 'Frame'} {number + 1} sampled at {time_s:.2f} seconds"
        for number, time_s in enumerate(_times(base, each))
    ]
    return tuple(
        part
        for first in range(0, len(labels), each)
        for part in (f"{chr(10) if first else ''}{' and '.join(labels[first : first + each])}: {start}", one, end)
    )


def _times(base: TimeBase, each: int) -> list[float]:
    """The time of each frame in the text. Those of embeddings are evenly spaced within their slice."""
    if not base.frames_s:
        within = [float(number * base.seconds_per_grid / each) for number in range(each)]
        return [time_s + later for time_s in base.slices_s for later in within]
    if base.source_fps is None:
        return list(base.frames_s)
    per_s = float(base.source_fps)
    frame_ms = int(1000.0 / per_s)
    return [round(time_s * per_s) * frame_ms / 1000.0 for time_s in base.frames_s]


def _multiple(side: int, of: int, *, up: bool) -> int:
    """The nearest multiple, not above `side`, or not below it."""
    return -(-side // of) * of if up else side // of * of
