"""Decodes the selected frames of a video in order, with as little decoding as possible.

It owns seeking and the repair of damage. It seeks whenever a later keyframe precedes the next selected frame, and has
the codec skip frames that are neither selected nor referred to by others:

    packets    K . . . . . . . K . . . . . . . K . . .
    selected       ^     ^                     ^
    decoded    ───────────     (nothing)       ─        one seek, to the third keyframe

A decoder holds frames back: for their order, and one for each of its threads. Once it was given all frames that are
selected before the next seek, it is drained, which yields them without the packets after them.

It knows nothing of resizing and slices.
"""

from __future__ import annotations

import bisect
import mmap
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain

import av
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from gridsieve.common.contract.errors import MediaDamaged, MediaRejected
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.card import Card, NotOnCard
from gridsieve.services.preprocessing.video.epochs import EpochShifts
from gridsieve.services.preprocessing.video.fields import SecondFields
from gridsieve.services.preprocessing.video.orientation import upright
from gridsieve.services.preprocessing.video.packets import (
    MAX_FRAME_PX,
    PacketIndex,
    decoder_of,
    open_video,
    packets_of,
)
from gridsieve.services.preprocessing.video.references import unreferenced_are_skipped
from gridsieve.services.preprocessing.video.resize import UInt8Array
from gridsieve.services.preprocessing.video.rgb import RgbConverter

MAX_REPAIRED_SHARE = 0.1

# Two threads cost a quarter more work than one, which smaller frames do not win back.
THREADED_FROM_PX = 640 * 360

# The largest pixel of common formats: three channels of 16 bits.
_LARGEST_PIXEL_BYTES = 6


@dataclass(frozen=True, slots=True, eq=False)
class DecodedFrame:
    """pixels: uint8 [H, W, 3], RGB, upright. repaired: the frame could not be decoded and repeats the one before."""

    pixels: UInt8Array
    repaired: bool


def decode_frames(
    source: Source,
    index: PacketIndex,
    places: Sequence[int],
    progress: Callable[[], None] = lambda: None,
    whole: int = 0,
    repaired: int = 0,
    threads: int = 1,
    card: Card | None = None,
) -> Generator[DecodedFrame, None, None]:
    """Yields one frame for each of `places`, which must not decrease.

    progress: called for each packet that is read. whole: places of the item, of which these may be a part (0: they are
    all), and of which `repaired` earlier ones were repaired. threads: of the codec, except for small frames.
    card: which decodes; what it does not decode, or fails at, the CPU decodes.
    Raises MediaDamaged if more than a tenth of the item's frames cannot be decoded, or MemoryError if FFmpeg ran out of
    memory meanwhile; MediaRejected for exceeded limits.
    """
    whole = whole or len(places)
    allowed = MAX_REPAIRED_SHARE * whole
    with ExitStack() as stack:
        frames: _Frames | None = None
        last: DecodedFrame | None = None
        last_place: int | None = None
        for number, place in enumerate(places):
            if last is None or place != last_place:
                try:
                    frames = frames or _Frames(source, index, places, progress, threads, stack, card)
                    last = frames.at(place, last)
                except NotOnCard:
                    frames = _Frames(source, index, places[number:], progress, threads, stack, None)
                    last = frames.at(place, last)
                last_place = place
            repaired += last.repaired
            if repaired > allowed:
                assert frames
                raise frames.damage(f"{repaired} of its {whole} frames cannot be decoded, at most a tenth may be")
            yield last


class _Frames:
    """A forward-only reader of decoded frames by presentation time: `behind` is shown before `ahead`."""

    def __init__(
        self,
        source: Source,
        index: PacketIndex,
        places: Sequence[int],
        progress: Callable[[], None],
        threads: int,
        stack: ExitStack,
        card: Card | None,
    ) -> None:
        self._source = source
        self._progress = progress
        self._threads = threads
        self._lacked_memory = False
        self._stack = stack
        self._card = card
        self._converter = RgbConverter(source.name)
        self._keys = range(len(index.times.ticks)) if index.pts is None else index.pts
        self._by_order = index.pts is None
        self._wanted = sorted({self._keys[place] for place in places})
        self._due: set[int] = set()  # wanted before the next seek, and not given to the decoder yet
        self._orientation = index.orientation
        self._keyframes: Sequence[int] = index.keyframes
        self._epochs = index.epochs
        self._skip_to: int | None = None
        self._read_to = self._keyframes[0] if self._keyframes else 0  # shown time of the last keyframe that was read
        self._behind: VideoFrame | None = None
        self._ahead: VideoFrame | None = None
        self._ahead_key = index.keyframes[0] if index.keyframes else 0
        self._open(self._wanted[0])

    def at(self, place: int, last: DecodedFrame | None) -> DecodedFrame:
        """The frame at `place`, or its replacement if it cannot be decoded. `last`: the frame returned before."""
        wanted = self._keys[place]
        keyframe = bisect.bisect_right(self._keyframes, wanted) - 1
        if keyframe >= 0 and self._keyframes[keyframe] > self._ahead_key:
            self._seek(self._keyframes[keyframe], wanted)
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
        return MediaDamaged(f"is damaged: {text}", field=self._source.name)

    def _room_for_a_frame(self) -> bool:
        size = self._stream.codec_context
        try:
            mmap.mmap(-1, min(max(1, size.height * size.width), MAX_FRAME_PX) * _LARGEST_PIXEL_BYTES).close()
        except OSError:
            return False
        return True

    def _open(self, wanted: int) -> None:
        """Begins at the start of the file. wanted: the frame that is wanted next."""
        self._due = self._run_of(wanted)
        card = self._card
        try:
            opened = open_video(self._source, card.accelerator if card else None)
            self._container, self._stream = self._stack.enter_context(opened)
            self._stream.thread_type = "FRAME"
            codec = self._stream.codec_context
            is_threaded = card is None and codec.height * codec.width >= THREADED_FROM_PX
            codec.thread_count = self._threads if is_threaded else 1
            self._codec = card.decoder_of(self._stream) if card else decoder_of(self._stream)
        except (MediaRejected, av.FFmpegError) as error:
            if card is None:
                raise
            card.lost = True  # it is not the file's fault: the CPU has made an index of it
            raise NotOnCard from error
        self._decoded = self._decode(packets_of(self._container, self._stream))

    def _run_of(self, wanted: int) -> set[int]:
        """The wanted frames from this one on that are read without another seek; none if there are no seeks."""
        if len(self._epochs) > 1:
            return set()
        run, last = {wanted}, wanted
        for key in self._wanted[bisect.bisect_right(self._wanted, wanted) :]:
            if bisect.bisect_right(self._keyframes, key) > bisect.bisect_right(self._keyframes, last):
                break
            run.add(key)
            last = key
        return run

    def _seek(self, keyframe: int, wanted: int) -> None:
        """Continues from `keyframe`, or from the start if the container's own index leads past the keyframe.

        wanted: the frame that is wanted next. Where times are stored more than once, packets are read and dropped
        instead.
        """
        self._due = self._run_of(wanted)
        if len(self._epochs) > 1:
            if keyframe > self._read_to:
                self._behind = self._ahead = None
                self._ahead_key = self._skip_to = keyframe
            return
        self._behind = self._ahead = None
        try:
            self._container.seek(keyframe, stream=self._stream)
            self._codec.flush_buffers()
            packets = packets_of(self._container, self._stream)
            first = next((each for each in packets if each.is_keyframe), None)
        except av.FFmpegError:
            first = None
        if first is not None and first.pts is not None and first.pts <= keyframe:
            self._ahead_key = keyframe
            self._decoded = self._decode(chain((first,), packets))
        else:
            self._keyframes = ()
            self._stack.close()
            self._open(wanted)

    def _decode(self, packets: Iterable[Packet[VideoStream]]) -> Iterator[tuple[int, VideoFrame]]:
        """(shown time or ordinal, frame) of each frame that can be decoded."""
        self._order, was_due = 0, False
        shifts = EpochShifts(self._epochs)
        second_fields = SecondFields(self._codec)
        skips = not self._by_order and unreferenced_are_skipped(self._codec)
        wanted = frozenset(self._wanted)
        for packet in packets:
            self._progress()
            is_second_field = not packet.is_discard and second_fields.holds(packet)
            if was_due and not self._due and not is_second_field:
                was_due = False
                yield from self._frames_of(None)
                self._codec.flush_buffers()  # where they are damaged, a later one is wanted
            if not packet.is_discard and shifts.count_packet() and self._skip_to is None:
                yield from self._frames_of(None)
                self._codec.flush_buffers()
            shown = None if packet.pts is None or self._by_order else self._indexed(packet.pts + shifts.shift)
            if shown is not None and packet.is_keyframe:
                self._read_to = max(self._read_to, shown)
            if self._skip_to is not None:
                if shown != self._skip_to or not packet.is_keyframe:
                    continue
                self._skip_to = None
                self._codec.flush_buffers()
            if not is_second_field:
                packet.pts = shown  # the frame's, whatever the codec holds back
                if skips:
                    self._codec.skip_frame = "DEFAULT" if shown in wanted else "NONREF"
                was_due |= shown in self._due
                self._due.discard(shown)
            yield from self._frames_of(packet)
        yield from self._frames_of(None)

    def _indexed(self, shown: int) -> int | None:
        """A time that the index has; None for any other."""
        place = bisect.bisect_left(self._keys, shown)
        return shown if place < len(self._keys) and self._keys[place] == shown else None

    def _frames_of(self, packet: Packet[VideoStream] | None) -> Iterator[tuple[int, VideoFrame]]:
        """What the codec yields for a packet; without one, all that it holds back."""
        try:
            frames = self._codec.decode(packet)
        except av.FFmpegError as error:
            if self._card and not isinstance(error, EOFError):
                self._card.lost |= isinstance(error, av.error.ExternalError)
                raise NotOnCard from error
            self._lacked_memory |= isinstance(error, MemoryError)
            return
        for frame in frames:
            key = self._order if self._by_order else frame.pts
            self._order += 1
            if key is not None and not frame.is_corrupt:
                yield key, frame

    def _rgb(self, frame: VideoFrame) -> UInt8Array:
        planar = self._card.planar(frame, self._codec) if self._card else frame
        return upright(self._converter.rgb(planar), self._orientation)
