"""The packet index of a video: reads all packets to find when each frame is shown, without decoding.

Only where the header hints at a display matrix, one frame is decoded. It owns how containers are opened safely. The
header's frame count and duration are not trusted: damaged files declare missing frames, and Matroska declares none.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain, islice, pairwise
from typing import TypeVar

import av
import numpy as np
from av.audio.stream import AudioStream
from av.codec.hwaccel import HWAccel
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.codeccontext import VideoCodecContext
from av.video.stream import VideoStream

from gridsieve.common.contract.errors import MediaRejected
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.completeness import missing_frames, tagged_duration_s
from gridsieve.services.preprocessing.video.epochs import MAX_EPOCHS, Epoch, EpochReader
from gridsieve.services.preprocessing.video.fields import SecondFields
from gridsieve.services.preprocessing.video.orientation import ON_ITS_SIDE, UPRIGHT, may_be_turned, orientation_of
from gridsieve.services.preprocessing.video.sampling import FrameTimes
from gridsieve.services.preprocessing.video.timing import MAX_LENGTH_S
from gridsieve.services.preprocessing.video.unread_formats import unread_format

StreamT = TypeVar("StreamT", VideoStream, AudioStream)

MAX_FRAME_PX = 2**26
MAX_PACKETS = 2**22
# Limit on |presentation time| in ticks. Differences of two still fit into int64.
MAX_PTS = 2**62

# A playlist inside a file must not open other files or hosts. The source itself is read without any protocol.
OPEN_OPTIONS = {"protocol_whitelist": "none"}
_FALLBACK_RATE = Fraction(25)
# What is not shown by itself: a picture, thumbnails, the layers of another stream.
_PARTS_OF_FILMS = Disposition.still_image | Disposition.timed_thumbnails | Disposition.dependent
_ALPHA_DECODERS = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
_NO_TIME_BASE = Fraction(1, 1000)
# The orientation is taken from a frame within this many first packets.
_FIRST_PACKETS = 64


@dataclass(frozen=True, slots=True)
class PacketIndex:
    """Where a video's frames are.

    pts:       0   512  1024  1536 | 2048 ...       sorted, in the stream's time base
    keyframes: 0                     2048            pts from which decoding may start

    times: the same times, relative to the first frame.
    missing_frames: how many more the container promises, see `completeness`.
    dropped_frames: how many are not shown: without a keyframe before them, with the time of another, or a wrong one.
    epochs: where the clock starts again, see `epochs`; all times are shown ones.
    pts, keyframes: int64 arrays; tuples would take ten times the memory for a long video.
    pts: None where the container stores no usable ones: frames are then identified by their order, and first_tick is
        the decoding time at which the first one is shown, in the time base of `times`.
    sizes: bytes of the packet of each frame, as many as pts; None where pts is None.
    height_px, width_px: of an upright frame with square pixels. orientation: EXIF number of the turn that makes a
        decoded frame upright.
    """

    times: FrameTimes
    pts: array[int] | None
    keyframes: array[int]
    height_px: int = 0
    width_px: int = 0
    orientation: int = UPRIGHT
    missing_frames: int = 0
    dropped_frames: int = 0
    epochs: tuple[Epoch, ...] = (Epoch(0, 0),)
    sizes: array[int] | None = None
    first_tick: int = 0

    @property
    def begins_s(self) -> Fraction:
        """When the first frame is shown, in seconds of the container's time."""
        return (self.first_tick if self.pts is None else self.pts[0]) * self.times.time_base

    def keyframe_places(self, begin: int, end: int) -> list[int]:
        """The places of keyframes among the frames [begin, end), increasing. Empty where their times are not known."""
        if self.pts is None:
            return []
        places = np.unique(np.searchsorted(np.asarray(self.pts), np.asarray(self.keyframes)))
        found: list[int] = places[(places >= begin) & (places < end)].tolist()
        return found


@contextmanager
def open_container(
    source: Source, accelerator: HWAccel | None = None, kinds: str = "an image or a video"
) -> Iterator[InputContainer]:
    """Opens the container. Raises MediaRejected for a file that is not read.

    accelerator: of the decoders of all its streams, where it has any. kinds: what it may be, for error texts.
    """
    with source.open() as file:
        if unread := unread_format(file):
            raise MediaRejected(f"is {unread}", field=source.name)
        try:
            container = av.open(file, mode="r", options=OPEN_OPTIONS, metadata_errors="replace", hwaccel=accelerator)
        except MemoryError:
            raise
        except (av.FFmpegError, ValueError) as error:
            text = f"cannot be read as {kinds}: {reason_of(error)}"
            raise MediaRejected(text, field=source.name) from error
        with container:
            yield container


@contextmanager
def open_video(source: Source, accelerator: HWAccel | None = None) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Opens the container and its `video_stream`. Raises MediaRejected for a file that is not read.

    accelerator: as in `open_container`.
    """
    with open_container(source, accelerator) as container:
        stream = video_stream(container, source.name)
        if _reads_one_picture(container.format.name):
            text = f"is a picture that is not read ({container.format.name.removesuffix('_pipe')})"
            raise MediaRejected(text, field=source.name, remedy="convert it to JPEG, PNG, WebP or AVIF")
        yield container, stream


def video_stream(container: InputContainer, name: str) -> VideoStream:
    """The video stream that is shown; never a cover. Raises MediaRejected without one.

    One whose codec is read comes before others, a film before a picture, the container's default before others, then
    the one with the most pixels a frame, then the first. ffmpeg does so, too, but prefers a larger picture to a film.
    """
    streams = [each for each in container.streams.video if not each.disposition & Disposition.attached_pic]
    if not streams:
        sound = ", only audio" if container.streams.audio else ""
        raise MediaRejected(f"has no video stream{sound}", field=name)
    return max(streams, key=_preference)


def _preference(stream: VideoStream) -> tuple[bool, bool, bool, int]:
    codec = stream.codec_context
    # An animated AVIF has its first frame as a stream of its own, before the others. Matroska counts no frames, but has
    # a tag with the duration of each stream.
    lasts_s, rate = tagged_duration_s(stream), stream.guessed_rate
    is_one_frame = stream.frames == 1 or (lasts_s is not None and rate is not None and lasts_s * rate <= 1)
    is_film = not is_one_frame and not stream.disposition & _PARTS_OF_FILMS
    is_default = bool(stream.disposition & Disposition.default)
    return codec is not None, is_film, is_default, codec.height * codec.width if codec else 0


def decoder_of(stream: VideoStream) -> VideoCodecContext:
    """The decoder of a stream. Those of FFmpeg itself for VP8 and VP9 leave transparency out."""
    codec, tags = stream.codec_context, {name.lower(): value for name, value in stream.metadata.items()}
    if tags.get("alpha_mode") != "1" or codec.name not in _ALPHA_DECODERS:
        return codec
    made = av.CodecContext.create(_ALPHA_DECODERS[codec.name], "r")
    assert isinstance(made, VideoCodecContext)
    made.extradata, made.thread_count = codec.extradata, codec.thread_count
    return made


def _reads_one_picture(demuxer: str) -> bool:
    """Whether a demuxer reads pictures, which are no videos. JPEGs may follow one another, and PNG may be animated."""
    return demuxer == "ico" or (demuxer.endswith("_pipe") and demuxer not in ("jpeg_pipe", "png_pipe"))


def packets_of(container: InputContainer, stream: StreamT) -> Iterator[Packet[StreamT]]:
    """The stream's packets from the container's current position to its end, or to where reading fails."""
    with suppress(av.FFmpegError):
        yield from (packet for packet in demuxed(container, stream) if packet.size)


def demuxed(container: InputContainer, stream: StreamT) -> Iterator[Packet[StreamT]]:
    """As `packets_of`, with an empty packet at the end. Raises FFmpegError where reading fails."""
    packets = container.demux(stream)
    while True:
        try:
            yield from packets
            return
        except IndexError:  # raised by PyAV at a packet of a stream that the header did not announce
            packets = container.demux(stream)


def read_packets(source: Source) -> PacketIndex:
    """Reads every packet of the video stream. Raises MediaRejected for no frames or an exceeded limit."""
    with open_video(source) as (container, stream):
        height, width = _frame_size(source, stream)
        time_base = stream.time_base or _NO_TIME_BASE
        reader = EpochReader(time_base, container.format.name)
        second_fields = SecondFields(stream.codec_context)
        for packet in packets_of(container, stream):
            if packet.is_discard:
                reader.hide(packet)
                continue
            if second_fields.holds(packet):
                reader.second_field(packet)
                continue
            if reader.packets == MAX_PACKETS:
                raise MediaRejected(f"has more than {MAX_PACKETS} frames", field=source.name)
            if abs(packet.pts or 0) >= MAX_PTS:
                text = f"has a frame at {packet.pts} ticks, all must be within ±{MAX_PTS}"
                raise MediaRejected(text, field=source.name)
            reader.show(packet)
        if not reader.packets:
            raise MediaRejected("holds no frames", field=source.name)
        index = _index(source, container, stream, reader, time_base)
        last_s = index.times.length_s if index.pts is None else index.pts[0] * time_base + index.times.length_s
        missing = missing_frames(source, container, stream, index.times, last_s) if len(index.epochs) == 1 else 0
    if index.times.length_s > MAX_LENGTH_S:
        text = f"claims to last {float(index.times.length_s):.0f} s, at most {MAX_LENGTH_S} are allowed"
        raise MediaRejected(text, field=source.name)
    orientation = _orientation(source)
    if orientation in ON_ITS_SIDE:
        height, width = width, height
    return replace(index, height_px=height, width_px=width, orientation=orientation, missing_frames=missing)


def _index(
    source: Source, container: InputContainer, stream: VideoStream, reader: EpochReader, time_base: Fraction
) -> PacketIndex:
    """The index without what is not known from packets."""
    reader.finish()
    held = stream.codec_context.reorder_depth
    # AVI and ASF store decoding times. The presentation times that FFmpeg makes of them are wrong at a pause.
    by_order = not reader.is_timed or container.format.name == "avi" or (container.format.name == "asf" and held)
    average, guessed = stream.average_rate, stream.guessed_rate
    # The average of a raw stream is what FFmpeg assumes, whatever its codec declares.
    declared = (guessed, average, stream.base_rate) if by_order else (average, guessed, stream.base_rate)
    rates = tuple(rate for rate in declared if rate and rate > 0)
    tail = max(1, round(1 / ((*rates, _FALLBACK_RATE)[0] * time_base)))
    if by_order:
        first_tick, times = _times_in_order(reader, held, tail, time_base, rates or (_FALLBACK_RATE,))
        return PacketIndex(times, None, array("q"), first_tick=first_tick)
    if len(reader) > MAX_EPOCHS:
        raise MediaRejected(f"has a clock that starts again more than {MAX_EPOCHS} times", field=source.name)
    epochs = reader.epochs(tail)
    try:
        shown, sizes, keyframes = reader.shown(epochs)
        times = FrameTimes(array("q", (each - shown[0] for each in shown)), reader.tail(tail), time_base, rates)
    except OverflowError as error:  # each time is in its range, their sum is not
        raise MediaRejected("claims to last more ticks than a clock has", field=source.name) from error
    dropped = reader.packets - len(shown)
    return PacketIndex(times, shown, keyframes, epochs=epochs, dropped_frames=dropped, sizes=sizes)


def _times_in_order(
    reader: EpochReader, held: int, step: int, time_base: Fraction, rates: tuple[Fraction, ...]
) -> tuple[int, FrameTimes]:
    """The first tick and the times of frames that only their order identifies: by decoding times, else by rate.

    decoding times    0  1  2  3  9 10          a decoder that holds two frames shows the first one with the third
    shown                   2  3  9 10 11 12
    """
    dts, frames = reader.dts, reader.packets
    within = chain((-MAX_PTS,), dts, (MAX_PTS,))
    if len(dts) < frames or any(before >= after for before, after in pairwise(within)):
        return 0, FrameTimes(array("q", range(frames)), 1, 1 / rates[0], rates[:1])
    shown = (dts + array("q", (dts[-1] + step * number for number in range(1, held + 1))))[held:]
    return shown[0], FrameTimes(array("q", (each - shown[0] for each in shown)), step, time_base, rates)


def _orientation(source: Source) -> int:
    """The orientation of the first frame that can be decoded, if the header hints at a display matrix."""
    with source.open() as file:
        if not may_be_turned(file):
            return UPRIGHT
    with open_video(source) as (container, stream):
        stream.codec_context.thread_count = 1
        for packet in chain(islice(packets_of(container, stream), _FIRST_PACKETS), (None,)):
            try:
                frames = stream.decode(packet)
            except av.FFmpegError:
                continue
            for frame in frames:
                return orientation_of(frame)
    return UPRIGHT


def _frame_size(source: Source, stream: VideoStream) -> tuple[int, int]:
    if stream.codec_context is None:
        raise MediaRejected("uses an unsupported codec", field=source.name)
    height, width = stream.codec_context.height, stream.codec_context.width
    if height < 1 or width < 1:
        raise MediaRejected("does not declare its frame size: it is damaged or not a video", field=source.name)
    check_frame_size(source.name, height, width)
    pixel_aspect = stream.sample_aspect_ratio or 1
    width = max(1, round(width * pixel_aspect)) if pixel_aspect > 0 else width
    check_frame_size(source.name, height, width)
    return height, width


def check_frame_size(name: str, height_px: int, width_px: int) -> None:
    """Raises MediaRejected for frames of more than MAX_FRAME_PX pixels."""
    if height_px * width_px > MAX_FRAME_PX:
        text = f"has frames of {width_px}×{height_px} pixels, at most {MAX_FRAME_PX} are allowed"
        raise MediaRejected(text, field=name)


def reason_of(error: Exception) -> str:
    """What FFmpeg or PyAV says."""
    return str(getattr(error, "strerror", None) or error)
