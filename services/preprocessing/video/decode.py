"""Decodes the selected frames of a video in order, with as little decoding as possible.

It owns seeking and the repair of damage. It seeks whenever a later keyframe precedes the next selected frame, and has
the codec skip frames that are neither selected nor referred to by others:

    packets    K . . . . . . . K . . . . . . . K . . .
    selected       ^     ^                     ^
    decoded    ───────────     (nothing)       ─        one seek, to the third keyframe

It knows nothing of resizing and slices.
"""

from __future__ import annotations

import bisect
import math
import mmap
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Self

import av
import numpy as np
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.reformatter import VideoReformatter
from av.video.stream import VideoStream

from common.contract.errors import MediaDamaged, MediaRejected
from services.preprocessing.sources.source import Source
from services.preprocessing.video.orientation import upright
from services.preprocessing.video.packets import MAX_FRAME_PX, PacketIndex, check_frame_size, open_video, packets_of
from services.preprocessing.video.resize import UInt8Array

MAX_REPAIRED_SHARE = 0.1

# More threads hardly speed up one video, and two cost a quarter more work than one, which small frames do not win back.
# Without a bound, codecs start one for each core in every worker.
_CODEC_THREADS, _THREADED_FROM_PX = 2, 640 * 360

# Codecs whose frames outside AVDISCARD_NONREF no other frame refers to: H.264's nal_ref_idc of 0.
_SKIPPING_CODECS = ("h264",)

# The largest pixel of common formats: three channels of 16 bits.
_LARGEST_PIXEL_BYTES = 6


class RemainingPlaces(tuple[int, ...]):
    """The remaining places of an item that has `whole` places, of which `repaired` earlier ones were repaired."""

    whole: int
    repaired: int

    @classmethod
    def of(cls, places: Iterable[int], whole: int, repaired: int) -> Self:
        rest = cls(places)
        rest.whole, rest.repaired = whole, repaired
        return rest


@dataclass(frozen=True, slots=True, eq=False)
class DecodedFrame:
    """pixels: uint8 [H, W, 3], RGB, upright. repaired: the frame could not be decoded and repeats the one before."""

    pixels: UInt8Array
    repaired: bool


def decode_frames(
    source: Source, index: PacketIndex, places: Sequence[int], max_pixels: float = math.inf
) -> Generator[DecodedFrame, None, None]:
    """Yields one frame for each of `places`, which must not decrease.

    max_pixels: of all frames that are decoded, including those between the selected ones.
    Raises MediaDamaged if more than a tenth of the item's frames cannot be decoded (of the whole item where `places`
    are `RemainingPlaces`), or MemoryError if FFmpeg ran out of memory meanwhile; MediaRejected for exceeded limits.
    """
    whole, repaired = (places.whole, places.repaired) if isinstance(places, RemainingPlaces) else (len(places), 0)
    allowed = MAX_REPAIRED_SHARE * whole
    with ExitStack() as stack:
        frames = _Frames(source, index, places, max_pixels, stack)
        last: DecodedFrame | None = None
        last_place: int | None = None
        for place in places:
            if last is None or place != last_place:
                last, last_place = frames.at(place, last), place
            repaired += last.repaired
            if repaired > allowed:
                raise frames.damage(f"{repaired} of its {whole} frames cannot be decoded, at most a tenth may be")
            yield last


class _Frames:
    """A forward-only reader of decoded frames by presentation time: `behind` is shown before `ahead`."""

    def __init__(
        self, source: Source, index: PacketIndex, places: Sequence[int], max_pixels: float, stack: ExitStack
    ) -> None:
        self._source = source
        self._max_pixels = max_pixels
        self._pixels = 0
        self._lacked_memory = False
        self._stack = stack
        # `frame.reformat` would start threads for each frame anew, which is ten times as slow on shared cores.
        self._reformatter = VideoReformatter()
        self._keys = range(len(index.times.ticks)) if index.pts is None else index.pts
        self._by_order = index.pts is None
        self._wanted = {self._keys[place] for place in places}
        self._orientation = index.orientation
        self._keyframes: Sequence[int] = index.keyframes
        self._behind: VideoFrame | None = None
        self._ahead: VideoFrame | None = None
        self._ahead_key = index.keyframes[0] if index.keyframes else 0
        self._open()

    def at(self, place: int, last: DecodedFrame | None) -> DecodedFrame:
        """The frame at `place`, or its replacement if it cannot be decoded. `last`: the frame returned before."""
        wanted = self._keys[place]
        keyframe = bisect.bisect_right(self._keyframes, wanted) - 1
        if keyframe >= 0 and self._keyframes[keyframe] > self._ahead_key:
            self._seek(self._keyframes[keyframe])
        while self._ahead is None or self._ahead_key < wanted:
            self._behind = self._ahead or self._behind
            following = next(self._decoded, None)
            if following is None:
                self._ahead = None
                break
            self._ahead_key, self._ahead = following
        if self._ahead is not None and self._ahead_key == wanted:
            return DecodedFrame(self._rgb(self._ahead), repaired=False)
        if self._behind is not None:
            return DecodedFrame(self._rgb(self._behind), repaired=True)
        if last is not None:
            return DecodedFrame(last.pixels, repaired=True)
        if self._ahead is not None:  # no frame precedes the damage: repeat the first frame that can be decoded
            return DecodedFrame(self._rgb(self._ahead), repaired=True)
        raise self.damage("none of its frames can be decoded")

    def damage(self, text: str) -> Exception:
        """The error for damaged media: MemoryError if decoding failed for lack of memory, else MediaDamaged.

        A failed allocation alone does not end decoding, because damaged files make FFmpeg ask for huge buffers. Some
        decoders (H.264) do not report it, so an allocation of a frame's size is tried as well.
        """
        if self._lacked_memory or not self._room_for_a_frame():
            return MemoryError(text)
        return MediaDamaged(f"{self._source.name} is damaged: {text}")

    def _room_for_a_frame(self) -> bool:
        size = self._stream.codec_context
        try:
            mmap.mmap(-1, min(max(1, size.height * size.width), MAX_FRAME_PX) * _LARGEST_PIXEL_BYTES).close()
        except OSError:
            return False
        return True

    def _open(self) -> None:
        self._container, self._stream = self._stack.enter_context(open_video(self._source))
        self._stream.thread_type = "FRAME"
        codec = self._stream.codec_context
        codec.thread_count = _CODEC_THREADS if codec.height * codec.width >= _THREADED_FROM_PX else 1
        self._decoded = self._decode(self._stream, packets_of(self._container, self._stream))

    def _seek(self, keyframe: int) -> None:
        """Continues from `keyframe`, or from the start if the container's own index leads past the keyframe."""
        self._behind = self._ahead = None
        try:
            self._container.seek(keyframe, stream=self._stream)
            packets = packets_of(self._container, self._stream)
            first = next(packets, None)
        except av.FFmpegError:
            first = None
        if first is not None and first.pts is not None and first.pts <= keyframe:
            self._ahead_key = keyframe
            self._decoded = self._decode(self._stream, chain((first,), packets))
        else:
            self._keyframes = ()
            self._stack.close()
            self._open()

    def _decode(self, stream: VideoStream, packets: Iterable[Packet[VideoStream]]) -> Iterator[tuple[int, VideoFrame]]:
        """(presentation time or ordinal, frame) of each frame that can be decoded."""
        order = 0
        skips = not self._by_order and stream.codec_context.name in _SKIPPING_CODECS
        for packet in chain(packets, (None,)):
            if skips and packet:
                stream.codec_context.skip_frame = "DEFAULT" if packet.pts in self._wanted else "NONREF"
            try:
                frames = stream.decode(packet)
            except av.FFmpegError as error:
                self._lacked_memory |= isinstance(error, MemoryError)
                frames = []
            for frame in frames:
                self._count(frame)
                key = order if self._by_order else frame.pts
                order += 1
                if key is not None and not frame.is_corrupt:
                    yield key, frame

    def _count(self, frame: VideoFrame) -> None:
        self._pixels += frame.height * frame.width
        if self._pixels > self._max_pixels:
            raise MediaRejected(
                f"{self._source.name} has more than {self._max_pixels} pixels up to its last selected frame"
            )

    def _rgb(self, frame: VideoFrame) -> UInt8Array:
        check_frame_size(self._source.name, frame.height, frame.width)
        try:
            pixels = self._reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
        except MemoryError:
            raise
        except (av.FFmpegError, ValueError) as error:
            raise MediaRejected(f"{self._source.name} has an unsupported pixel format: {error}") from error
        return upright(pixels.astype(np.uint8, copy=False), self._orientation)
