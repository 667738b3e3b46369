"""The jobs that worker processes run on a media file: how each is encoded, and how its pieces are read and checked.

A job's name is a key of the worker's own table. Pieces come from a process that a malicious file may have taken over:
each is checked like a message of a remote peer, and an impossible value raises PeerContract.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.errors import PeerContract
from gridsieve.common.contract.plan import FRAME_DTYPES, MAX_FRAME_SIDE_PX, SizePx
from gridsieve.common.contract.tensors import DType
from gridsieve.common.sealed_memory import SealedMemory
from gridsieve.services.preprocessing.sound.planned import PlannedSound
from gridsieve.services.preprocessing.sound.track import SoundIndex
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.packets import MAX_PACKETS, PacketIndex
from gridsieve.services.preprocessing.video.pictures import PictureIndex
from gridsieve.services.preprocessing.video.resize import UInt8Array, View
from gridsieve.services.preprocessing.video.shots import compared_keyframes
from gridsieve.services.preprocessing.video.slices import PlannedVideo, Slice
from gridsieve.services.preprocessing.workers.indexes import (
    index_facts,
    index_of,
    picture_index_facts,
    picture_index_of,
    sound_index_facts,
    sound_index_of,
)
from gridsieve.services.preprocessing.workers.protocol import MAX_INT, Facts

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A job as it is sent to a worker: a name in its table, fields, and an array of numbers, int64 [N]."""

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    numbers: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


class Job(Protocol[T_co]):
    """A job on `source` that yields `pieces` pieces of at most `piece_bytes` each."""

    @property
    def source(self) -> Source: ...
    @property
    def pieces(self) -> int: ...
    @property
    def piece_bytes(self) -> int: ...
    @property
    def frames(self) -> int:
        """The frames that it makes."""
        ...

    def order(self, done: int) -> Order:
        """What to send to a worker that continues after `done` pieces."""
        ...

    def piece(self, number: int, facts: Facts, data: UInt8Array, memory: SealedMemory | None) -> T_co:
        """Piece `number`, from the fields and the array that a worker sent. memory: holds `data`.

        Raises PeerContract for impossible values.
        """
        ...


@dataclass(frozen=True, slots=True)
class _Reading:
    """Reads what a plan needs of a file: one piece, and no frames."""

    source: Source
    pieces: ClassVar[int] = 1
    piece_bytes: ClassVar[int] = 0
    frames: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class IndexVideo(_Reading):
    """Reads a video's packets."""

    piece_bytes: ClassVar[int] = 3 * MAX_PACKETS * 8

    def order(self, done: int) -> Order:
        return Order("index_video")

    def piece(self, number: int, facts: Facts, data: UInt8Array, memory: SealedMemory | None) -> PacketIndex:
        if data.size % 8:
            raise PeerContract("a worker's index is not an array of int64")
        return index_of(facts, data.view(np.int64))


@dataclass(frozen=True, slots=True)
class IndexPictures(_Reading):
    """Reads the header of a picture, or those of pictures that are the frames of a video. ends: as in PictureIndex."""

    ends: tuple[int, ...]

    def order(self, done: int) -> Order:
        return Order("index_pictures", numbers=np.array(self.ends, np.int64))

    def piece(self, number: int, facts: Facts, data: UInt8Array, memory: SealedMemory | None) -> PictureIndex:
        return picture_index_of(facts, self.ends)


@dataclass(frozen=True, slots=True)
class IndexSound(_Reading):
    """Reads the packets of a file's sound track: its index, or nothing for a file without one."""

    def order(self, done: int) -> Order:
        return Order("index_sound")

    def piece(self, number: int, facts: Facts, data: UInt8Array, memory: SealedMemory | None) -> tuple[SoundIndex, ...]:
        index = sound_index_of(facts)
        return () if index is None else (index,)


@dataclass(frozen=True, slots=True)
class FindShots:
    """Finds the first frames of the shots of a part of a video, as places. begin, end: of the part."""

    source: Source
    index: PacketIndex
    begin: int
    end: int
    pieces: ClassVar[int] = 1
    piece_bytes: ClassVar[int] = MAX_PACKETS * 8

    @property
    def frames(self) -> int:
        return len(compared_keyframes(self.index, self.begin, self.end))

    def order(self, done: int) -> Order:
        facts, numbers = index_facts(self.index)
        return Order("find_shots", facts | {"begin": self.begin, "end": self.end}, numbers)

    def piece(self, number: int, facts: Facts, data: UInt8Array, memory: SealedMemory | None) -> tuple[int, ...]:
        if data.size % 8:
            raise PeerContract("a worker's shots are not an array of int64")
        places = data.view(np.int64)
        in_order = bool((places[1:] > places[:-1]).all())
        if not (places.size and places[0] == self.begin and places[-1] < self.end and in_order):
            raise PeerContract("a worker's shots are out of order or out of range")
        return tuple(places.tolist())


@dataclass(frozen=True, slots=True)
class VideoSlices:
    """Decodes and resizes the selected frames of a video, one temporal slice a piece, or one picture of a frame.

    A worker that continues a job first repeats the slices from the last undamaged one on, because a frame that cannot
    be decoded is replaced by the frame before it:

        made      0   1   2   3        2 and 3 hold repaired frames
        repeated      1   2   3   4 ...
        sent                      4 ...

    begin, end: the temporal slices to make, of all those of the video; end defaults to their number. threads: of the
        codec.
    made_before: repaired frames of each slice before `begin`, if the job continues another one; if it does not,
        decoding begins at the keyframe before `begin`. A job object is run only once.
    """

    video: PlannedVideo
    begin: int = 0
    end: int = -1
    threads: int = 1
    made_before: list[int] = field(default_factory=list)
    _known_from: int = field(init=False)
    _repaired: list[int] = field(init=False)  # of each slice from _known_from on

    def __post_init__(self) -> None:
        end = self.end if self.end >= 0 else -(-len(self.video.places) // self.video.slice_frames)
        object.__setattr__(self, "end", end)
        object.__setattr__(self, "_known_from", self.begin - len(self.made_before))
        object.__setattr__(self, "_repaired", list(self.made_before))

    @property
    def source(self) -> Source:
        return self.video.source

    @property
    def pieces(self) -> int:
        return (self.end - self.begin) * len(self.video.views)

    @property
    def piece_bytes(self) -> int:
        pixels = max(math.prod(self.video.slice_shape(number)) for number in range(len(self.video.views)))
        return pixels * self.video.dtype.itemsize

    @property
    def frames(self) -> int:
        return (self.end - self.begin) * self.video.slice_frames

    def order(self, done: int) -> Order:
        video, known = self.video, self._known_from
        made, pictures = divmod(done, len(video.views))
        following = self.begin + made
        intact = (number for number in range(known, following) if not self._repaired[number - known])
        begin = max(intact, default=known)
        places = np.array(video.places[begin * video.slice_frames : self.end * video.slice_frames], np.int64)
        if isinstance(video.index, PacketIndex):
            name, (facts, numbers) = "video_slices", index_facts(video.index)
        else:
            name, facts = "picture_frames", picture_index_facts(video.index)
            numbers = np.array(video.index.ends, np.int64)
        sent = {
            "places": places.size,
            "whole": len(video.places),
            "repaired": sum(self._repaired[: begin - known]),
            "again": (following - begin) * len(video.views) + pictures,
            "slice_frames": video.slice_frames,
            "threads": self.threads,
            "tile_px": video.tile_px or (),
        }
        frames = _sent_facts(video.size_px, video.views, video.dtype)
        return Order(name, facts | sent | frames, np.concatenate([places, numbers]))

    def piece(self, number: int, facts: Facts, data: UInt8Array, memory: SealedMemory | None) -> Slice:
        video, number = self.video, self.begin * len(self.video.views) + number
        made = _slice(number * video.slice_frames, video.slice_shape(number), video.dtype, facts, data, memory)
        if number % len(video.views) == 0:
            self._repaired.append(made.repaired_frames)
        return made


@dataclass(frozen=True, slots=True)
class SoundFeatures:
    """Decodes a part of a sound track, and makes its features: one piece. Each second counts as a frame."""

    sound: PlannedSound
    pieces: ClassVar[int] = 1

    @property
    def source(self) -> Source:
        return self.sound.source

    @property
    def piece_bytes(self) -> int:
        return math.prod(self.sound.shape) * DType.FLOAT32.itemsize

    @property
    def frames(self) -> int:
        return math.ceil(self.sound.length_s)

    def order(self, done: int) -> Order:
        sound = self.sound
        facts = {
            "begin_s": [sound.start_s.numerator, sound.start_s.denominator],
            "samples": sound.samples,
            "features": type(sound.log_mel).__name__,
            "log_mel": asdict(sound.log_mel),
        }
        return Order("sound_features", sound_index_facts(sound.index) | facts)

    def piece(self, number: int, facts: Facts, data: UInt8Array, memory: SealedMemory | None) -> Slice:
        made = _made(0, self.sound.shape, DType.FLOAT32, facts, data, memory)
        if not np.isfinite(made.pixels).all():
            raise PeerContract("a worker's features of a sound are not finite")
        return made


def _sent_facts(size_px: SizePx, views: Sequence[View | None], dtype: DType) -> dict[str, Any]:
    return {"size_px": size_px, "views": [view and asdict(view) for view in views], "dtype": FRAME_DTYPES.index(dtype)}


def sent_of(facts: Facts) -> tuple[SizePx, tuple[View | None, ...], DType]:
    """Height and width of the frames that are sent, their views and dtype, from the fields of an order."""
    height, width = facts.integers("size_px", 2, 1, MAX_FRAME_SIDE_PX)
    views = tuple(None if view is None else _view(**view) for view in facts.values["views"])
    return (height, width), views, FRAME_DTYPES[facts.integer("dtype", 0, len(FRAME_DTYPES) - 1)]


def _view(squared: Sequence[int] | None, through: Sequence[Sequence[int]], **others: Any) -> View:
    sizes: Any = tuple(map(tuple, through))
    square: Any = None if squared is None else tuple(squared)
    return View(**others, squared=square, through=sizes)


def _slice(
    first_frame: int, shape: tuple[int, ...], dtype: DType, facts: Facts, data: UInt8Array, memory: SealedMemory | None
) -> Slice:
    made = _made(first_frame, shape, dtype, facts, data, memory)
    # Resampling overshoots the levels 0 to 255 by less than their range. Not a number is neither above nor below.
    if dtype is not DType.UINT8 and not (made.pixels.min() > -255 and made.pixels.max() < 510):
        raise PeerContract("a worker's slice has values that no resampling makes")
    return made


def _made(
    first_frame: int, shape: tuple[int, ...], dtype: DType, facts: Facts, data: UInt8Array, memory: SealedMemory | None
) -> Slice:
    if data.size != dtype.itemsize * np.prod(shape):
        raise PeerContract(f"a worker's slice has {data.size} bytes, which is not the size of {dtype.label} {shape}")
    repaired = facts.integer("repaired_frames", 0, shape[0])
    pixels = data.view(dtype.label).reshape(shape)
    return Slice(
        first_frame=first_frame,
        pixels=pixels,
        repaired_frames=repaired,
        decode_s=facts.seconds("decode_s"),
        resize_s=facts.seconds("resize_s"),
        decoded_ns=facts.integer("decoded_ns", 0, MAX_INT),
        resized_ns=facts.integer("resized_ns", 0, MAX_INT),
        memory=memory,
    )
