"""The plan of a prompt: its layout, which preprocessing decides and all later stages rely on.

    input_ids:  [text][pad pad pad pad pad pad][text]            N = 13
    media[0]:          runs ((4, 6),)  grid (t=3, h=1, w=2)      t·h·w = sum of the runs' lengths
    positions:  [3, N], for the full grid, as if nothing were pruned

This module knows neither protobuf (`wire.py`) nor the transport of arrays (`tensors.py`, whose element types it
names) nor any model family.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.tensors import DType

Int32Array: TypeAlias = NDArray[np.int32]
Bytes: TypeAlias = bytes | bytearray | memoryview
# Height and width.
SizePx: TypeAlias = tuple[int, int]

# Before pruning: a context of a million tokens at rate 0.75. A request of a few bytes can ask for this many, and each
# service holds 64 MiB for them.
MAX_PROMPT_TOKENS = 2**22
# Positions of the completion, which come after it, must be int32 as well.
MAX_POSITION = 2**31 - 1 - MAX_PROMPT_TOKENS
MAX_FRAME_SIDE_PX = 2**15
# Of the values of frames, which are levels from 0 to 255: rounded, or as resampling made them, some beyond these ends;
# the features of sounds are float32, too.
FRAME_DTYPES = (DType.UINT8, DType.FLOAT32)
DIGEST_BYTES = 32
# Which frames of a video are sampled: evenly spread ones, keyframes alone, or the first of each shot before others.
SAMPLING_MODES = (UNIFORM, KEYFRAMES, SHOTS) = ("uniform", "keyframes", "shots")
_SALT_DOMAIN = b"gridsieve salted v1"


class Modality(Enum):
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"

    @property
    def plural(self) -> str:
        """Several of them, in words."""
        return "sounds" if self is Modality.AUDIO else f"{self.value}s"


@dataclass(frozen=True, slots=True)
class Grid:
    """A media item's tokens after spatial merging: t temporal slices of h rows and w columns; of a sound one row."""

    t: int
    h: int
    w: int

    def __post_init__(self) -> None:
        if min(self.t, self.h, self.w) < 1:
            raise ValueError(f"a grid needs at least one token on each axis, got {self}")
        if self.tokens > MAX_PROMPT_TOKENS:
            raise ValueError(f"{self} has {self.tokens} tokens, at most {MAX_PROMPT_TOKENS} are allowed")

    @property
    def slice_tokens(self) -> int:
        return self.h * self.w

    @property
    def tokens(self) -> int:
        return self.t * self.h * self.w

    def __str__(self) -> str:
        return f"{self.t}×{self.h}×{self.w}"


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive prompt tokens [offset, offset + length) that belong to one media item."""

    offset: int
    length: int

    def __post_init__(self) -> None:
        if self.offset < 0 or self.length < 1:
            raise ValueError(f"a run starts at 0 or later and holds at least one token, got {self}")

    @property
    def end(self) -> int:
        return self.offset + self.length


@dataclass(frozen=True, slots=True)
class FrameShape:
    """How many frames of an item are sent, and their sizes after resizing. The default: none.

    count: pictures that are sent. An image has 1, and each of its tiles is one more. A video has its frames, and each
        tile of each frame. A sound has 1, its features. 0 if the prompt brought the item's embeddings.
    size_px: of each frame, but for tiles of another size; (0, 0) without frames. Of a sound: its mel bands, and the
        number of its frames of features.
    tile_px: of tiles, which are all frames of a picture but the first; None if these have the first one's size.
    tile_columns: of an image whose frames are the whole picture and then its tiles, row by row, or of a video each of
        whose frames is sent so: the tiles' columns, else 0.
    group_frames: frames of each temporal slice of a video whose slices are groups, the last of which may have fewer; 0
        if all slices have equally many.
    dtype: of the values, one of FRAME_DTYPES.
    """

    count: int = 0
    size_px: SizePx = (0, 0)
    tile_px: SizePx | None = None
    tile_columns: int = 0
    group_frames: int = 0
    dtype: DType = DType.UINT8

    def frame_px(self, index: int) -> SizePx:
        """Height and width of a frame of a picture."""
        return self.tile_px if index and self.tile_px else self.size_px


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Facts about an item's file, which later stages report and the encoder's tiles need.

    missing_frames: frames that its container promises and that it does not hold.
    dropped_frames: frames that have the same time as another one, and are not shown.
    source_px: of an image as it is shown, before it is resized; 0 if not known.
    """

    missing_frames: int = 0
    dropped_frames: int = 0
    source_px: SizePx = (0, 0)

    def __post_init__(self) -> None:
        for fact in (self.missing_frames, self.dropped_frames, *self.source_px):
            if not 0 <= fact < 2**31:
                raise ValueError(f"each fact about a file must be at least 0 and below 2^31, got {self}")


@dataclass(frozen=True, slots=True)
class MediaPlan:
    """One image, video or sound: where its tokens are in the prompt, and its frames.

    grid: in merged tokens.
    runs: sorted and disjoint, in grid order, grid.tokens in total.
    frames: those that preprocessing sends when the item is selected.
    seconds_per_grid: time between temporal slices; None for an image and a sound.
    timestamps_s: presentation time of each frame; empty for an image and a sound.
    content_hash: 32 bytes; they differ if the pixels, their times or the given embeddings could differ.
    fixed_tokens: whether the tokens of a frame are not in proportion to its pixels.
    timed_by_first: whether the time of a slice in the text is that of its first frame, else the middle of its frames.
    sampling_mode: one of SAMPLING_MODES; empty where nothing was sampled: of an image, given embeddings, and frames
        that the caller named.
    heard_s: how many seconds of a sound are heard; 0 for others.
    """

    modality: Modality
    grid: Grid
    runs: tuple[Run, ...]
    frames: FrameShape
    seconds_per_grid: Fraction | None
    timestamps_s: tuple[float, ...]
    content_hash: bytes
    file: FileFacts = FileFacts()
    fixed_tokens: bool = False
    timed_by_first: bool = False
    sampling_mode: str = ""
    heard_s: float = 0.0

    def __post_init__(self) -> None:
        held = sum(run.length for run in self.runs)
        if held != self.grid.tokens:
            raise ValueError(f"runs hold {held} tokens, the grid {self.grid} has {self.grid.tokens}")
        for before, after in pairwise(self.runs):
            if before.end > after.offset:
                raise ValueError(f"runs overlap or are out of order: {before}, {after}")
        self._check_frames()
        self._check_times()
        self._check_sound()
        if len(self.content_hash) != DIGEST_BYTES:
            raise ValueError(f"content_hash must have {DIGEST_BYTES} bytes, got {len(self.content_hash)}")

    def _check_frames(self) -> None:
        frames, tile_px, is_still = self.frames, self.frames.tile_px, self.modality is not Modality.VIDEO
        if not 0 <= frames.count <= MAX_PROMPT_TOKENS:
            raise ValueError(f"frames must be between 0 and {MAX_PROMPT_TOKENS}, got {frames.count}")
        min_px, max_px = (1, MAX_FRAME_SIDE_PX) if frames.count else (0, 0)
        if not min_px <= min(frames.size_px) <= max(frames.size_px) <= max_px:
            raise ValueError(f"a frame's side must be between {min_px} and {max_px} pixels, got {frames.size_px}")
        if frames.dtype not in FRAME_DTYPES:
            raise ValueError(f"frames are {' or '.join(each.label for each in FRAME_DTYPES)}, got {frames.dtype.label}")
        if 0 < frames.count < self.grid.t:
            raise ValueError(f"{frames.count} frames do not fill {self.grid.t} temporal slices")
        if tile_px and self.pictures < 2:
            raise ValueError(f"only what is sent as several pictures has tiles of another size, got {tile_px}")
        if tile_px and not 1 <= min(tile_px) <= max(tile_px) <= MAX_FRAME_SIDE_PX:
            raise ValueError(f"a tile's side must be between 1 and {MAX_FRAME_SIDE_PX} pixels, got {tile_px}")
        columns, tiles = frames.tile_columns, self.pictures - 1
        if columns and not (0 < columns <= tiles and tiles % columns == 0):
            raise ValueError(f"{tiles} tiles of a picture do not fill rows of {columns}")
        if columns and not is_still and frames.count != self.grid.t * self.pictures:
            raise ValueError(f"{frames.count} frames are not {self.grid.t} slices of {self.pictures} pictures")
        pixels = math.prod(frames.size_px) + (frames.count - 1) * math.prod(frames.frame_px(1))
        if frames.count and pixels < self.grid.tokens:
            raise ValueError(f"frames of {frames.size_px} pixels are too small for a grid of {self.grid}")
        if group := frames.group_frames:
            if is_still or columns or group < 0:
                raise ValueError(f"only a video without tiles has groups, of at least one frame, got {group}")
            if -(-frames.count // group) != self.grid.t:
                raise ValueError(f"{frames.count} frames in groups of {group} are not {self.grid.t} slices")

    def _check_times(self) -> None:
        times, step = self.timestamps_s, self.seconds_per_grid
        is_video = self.modality is Modality.VIDEO
        if not is_video and (self.grid.t > 1 or times):
            raise ValueError(f"an image and a sound have one slice and no times, got {self.grid} and {len(times)}")
        if is_video != (step is not None):
            raise ValueError(f"a video has a time base and no other item, got {self.modality.value}, {step}")
        if step is not None and step <= 0:
            raise ValueError(f"seconds_per_grid must be above 0, got {step}")
        if self.sampling_mode not in ("", *SAMPLING_MODES):
            raise ValueError(f"sampling_mode must be one of {SAMPLING_MODES}, got {self.sampling_mode!r}")
        if times and len(times) != self.frames.count:
            raise ValueError(
                f"timestamps_s must hold one time for each of {self.frames.count} frames, got {len(times)}"
            )
        if not all(map(math.isfinite, times)) or any(after < before for before, after in pairwise(times)):
            raise ValueError("timestamps_s must be finite, none below the one before")

    def _check_sound(self) -> None:
        frames, is_sound = self.frames, self.modality is Modality.AUDIO
        if is_sound and (self.grid.h > 1 or frames.count != 1 or frames.dtype is not DType.FLOAT32):
            raise ValueError(f"a sound is one row of tokens of one float32 frame, got {self.grid} and {frames}")
        if not (math.isfinite(self.heard_s) and (self.heard_s > 0) == is_sound):
            raise ValueError(f"heard_s must be above 0 for a sound and 0 for others, got {self.heard_s}")

    @property
    def channels(self) -> int:
        """Values of each pixel of a frame, or of each place of a sound's features."""
        return 1 if self.modality is Modality.AUDIO else 3

    @property
    def pictures(self) -> int:
        """How many frames are one picture and its tiles: those of an image, or of a temporal slice of a video with
        tile_columns, where each is a row of the grid; else 1."""
        if self.modality is not Modality.VIDEO:
            return self.frames.count
        return self.grid.h if self.frames.tile_columns else 1

    def frame_px(self, index: int) -> SizePx:
        """Height and width of a frame."""
        return self.frames.frame_px(index % self.pictures)

    @property
    def sampled_frames(self) -> int:
        """Different frames of a video that are sent; 0 for others and given embeddings."""
        return len(set(self.timestamps_s))

    @property
    def slices(self) -> int:
        """How many units are decoded and encoded one by one.

        A video without tiles: the rows of its grid. An image, or a video with tiles: each picture. A sound: all of it.
        """
        if self.brings_embeds or (self.modality is Modality.VIDEO and not self.frames.tile_columns):
            return self.grid.t
        return self.frames.count

    @property
    def slice_frames(self) -> int:
        """Frames of each of `slices`; the last may have fewer."""
        if self.modality is not Modality.VIDEO or self.brings_embeds or self.frames.tile_columns:
            return 1
        return self.frames.group_frames or -(-self.frames.count // self.grid.t)

    @property
    def brings_embeds(self) -> bool:
        """Whether the prompt brought the item's embeddings: nothing is decoded or encoded then."""
        return not self.frames.count


@dataclass(frozen=True, slots=True, eq=False)
class PromptPlan:
    """The full prompt, laid out as if nothing were pruned.

    input_ids: int32 [N].
    positions: int32 [3, N], the axes time, height, width.
    media: in the order of the prompt; their runs are disjoint and inside [0, N). Those of a sound may take turns with
        those of the video before it.
    embed_levels: additional embeddings of each media token (deepstack); 0 for most families.
    fingerprint: 32 bytes, of the checkpoint that the plan was made with.
    """

    input_ids: Int32Array
    positions: Int32Array
    media: tuple[MediaPlan, ...]
    embed_levels: int
    fingerprint: bytes

    def __post_init__(self) -> None:
        tokens = self.input_ids.size
        if self.input_ids.dtype != np.int32 or self.input_ids.shape != (tokens,):
            raise ValueError(f"input_ids must be int32 [N], got {self.input_ids.dtype} {self.input_ids.shape}")
        if not 1 <= tokens <= MAX_PROMPT_TOKENS:
            raise ValueError(f"a prompt has between 1 and {MAX_PROMPT_TOKENS} tokens, got {tokens}")
        if self.positions.dtype != np.int32 or self.positions.shape != (3, tokens):
            raise ValueError(
                f"positions must be int32 [3, {tokens}], got {self.positions.dtype} {list(self.positions.shape)}"
            )
        if self.input_ids.min() < 0 or self.positions.min() < 0 or self.positions.max() > MAX_POSITION:
            raise ValueError(f"ids and positions must be 0 or more, positions at most {MAX_POSITION}")
        if not 0 <= self.embed_levels <= 16:
            raise ValueError(f"embed_levels must be between 0 and 16, got {self.embed_levels}")
        if len(self.fingerprint) != DIGEST_BYTES:
            raise ValueError(f"fingerprint must have {DIGEST_BYTES} bytes, got {len(self.fingerprint)}")
        self._check_runs()

    def _check_runs(self) -> None:
        """Raises ValueError unless runs are disjoint and items in order, where a sound may begin before the end of the
        video before it."""
        end = 0
        for place, item in enumerate(self.media):
            if item.runs[0].offset < end and not _take_turns(*self.media[place - 1 : place + 1]):
                raise ValueError(f"{item.runs[0]} overlaps an earlier run")
            end = max(end, item.runs[-1].end)
        if end > self.tokens:
            raise ValueError(f"a run ends at {end}, after the prompt's {self.tokens} tokens")

    @property
    def tokens(self) -> int:
        return int(self.input_ids.size)

    def same_as(self, other: PromptPlan) -> bool:
        """Whether layout and media are equal."""
        return (
            (self.media, self.embed_levels, self.fingerprint) == (other.media, other.embed_levels, other.fingerprint)
            and np.array_equal(self.input_ids, other.input_ids)
            and np.array_equal(self.positions, other.positions)
        )

    def __repr__(self) -> str:
        grids = ", ".join(f"{item.modality.value} {item.grid}" for item in self.media)
        return f"PromptPlan(N={self.tokens}, media=[{grids}])"


def _take_turns(video: MediaPlan, sound: MediaPlan) -> bool:
    """Whether two items are a video and its sound, whose runs are disjoint and begin with the video's."""
    runs = sorted((*video.runs, *sound.runs), key=lambda run: run.offset)
    are_clip = (video.modality, sound.modality) == (Modality.VIDEO, Modality.AUDIO)
    return are_clip and runs[0] == video.runs[0] and all(a.end <= b.offset for a, b in pairwise(runs))


def tagged_digest(domain: bytes, parts: Sequence[Bytes]) -> bytes:
    """sha256 of a domain and parts, with their number and lengths: different inputs never hash the same bytes."""
    digest = hashlib.sha256()
    for part in (domain, struct.pack("<q", len(parts)), *parts):
        digest.update(struct.pack("<q", len(part)))
        digest.update(part)
    return digest.digest()


def salted(digest: bytes, salt: str) -> bytes:
    """What a digest is called in caches by prompts with this salt, 32 bytes; the digest itself for an empty one."""
    return tagged_digest(_SALT_DOMAIN, (salt.encode(), digest)) if salt else digest
