"""The packet index of a video: reads all packets to find when each frame is shown, without decoding.

Only where the header hints at a display matrix, one frame is decoded. It owns how containers are opened safely. The
header's frame count and duration are not trusted: damaged files declare missing frames, and Matroska declares none.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, islice

import av
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.stream import VideoStream

from common.contract.errors import MediaRejected
from services.preprocessing.sources.source import Source
from services.preprocessing.video.completeness import missing_frames
from services.preprocessing.video.orientation import ON_ITS_SIDE, UPRIGHT, may_be_turned, orientation_of
from services.preprocessing.video.sampling import FrameTimes
from services.preprocessing.video.timing import MAX_LENGTH_S

MAX_FRAME_PX = 2**26
MAX_PACKETS = 2**22
# Limit on |presentation time| in ticks. Differences of two still fit into int64.
MAX_PTS = 2**62

# A playlist inside a file must not open other files or hosts. The source itself is read without any protocol.
_OPEN_OPTIONS = {"protocol_whitelist": "none"}
_FALLBACK_RATE = Fraction(25)
# The orientation is taken from a frame within this many first packets.
_FIRST_PACKETS = 64


@dataclass(frozen=True, slots=True)
class PacketIndex:
    """Where a video's frames are.

    pts:       0   512  1024  1536 | 2048 ...       sorted, in the stream's time base
    keyframes: 0                     2048            pts from which decoding may start

    times: the same times, relative to the first frame.
    missing_frames: how many more the container promises, see `completeness`.
    pts, keyframes: int64 arrays; tuples would take ten times the memory for a long video.
    pts: None where the container stores no usable ones: frames are then identified by their order.
    height_px, width_px: of an upright frame. orientation: EXIF number of the turn that makes a decoded frame upright.
    """

    times: FrameTimes
    pts: array[int] | None
    keyframes: array[int]
    height_px: int
    width_px: int
    orientation: int
    missing_frames: int = 0


@contextmanager
def open_video(source: Source) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Opens the container and its first video stream that is not a cover image. Raises MediaRejected without one."""
    with source.open() as file:
        try:
            container = av.open(file, mode="r", options=_OPEN_OPTIONS)
        except MemoryError:
            raise
        except (av.FFmpegError, ValueError) as error:
            raise MediaRejected(f"{source.name} cannot be read as a video: {_reason(error)}") from error
        with container:
            streams = [each for each in container.streams.video if not each.disposition & Disposition.attached_pic]
            if not streams:
                sound = ", only audio" if container.streams.audio else ""
                raise MediaRejected(f"{source.name} has no video stream{sound}")
            yield container, streams[0]


def packets_of(container: InputContainer, stream: VideoStream) -> Iterator[Packet[VideoStream]]:
    """The stream's packets from the container's current position to its end, or to where reading fails."""
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets, None)
        except IndexError:  # raised by PyAV at a packet of a stream that the header did not announce
            packets = container.demux(stream)
            continue
        except av.FFmpegError:
            return
        if packet is None:
            return
        if packet.size:
            yield packet


def read_packets(source: Source) -> PacketIndex:
    """Reads every packet of the video stream. Raises MediaRejected for no frames or an exceeded limit."""
    with open_video(source) as (container, stream):
        height, width = _frame_size(source, stream)
        pts: list[int | None] = []
        keyframes: list[int] = []
        tail = 0
        for packet in packets_of(container, stream):
            if packet.is_discard:
                continue
            if len(pts) == MAX_PACKETS:
                raise MediaRejected(f"{source.name} has more than {MAX_PACKETS} frames")
            pts.append(packet.pts)
            tail = packet.duration or tail
            if packet.is_keyframe and packet.pts is not None:
                keyframes.append(packet.pts)
        if not pts:
            raise MediaRejected(f"{source.name} holds no frames")
        rates = tuple(
            rate for rate in (stream.average_rate, stream.guessed_rate, stream.base_rate) if rate and rate > 0
        )
        known = [each for each in pts if each is not None]
        # AVI stores no presentation times, and those that FFmpeg makes up are out of order where there are B-frames.
        if len(known) < len(pts) or container.format.name == "avi" or stream.time_base is None:
            times, shown = _by_order(len(pts), rates), None
            last_s = times.length_s
        else:
            furthest = max(known, key=abs)
            if abs(furthest) >= MAX_PTS:
                raise MediaRejected(f"{source.name} has a frame at {furthest} ticks, all must be within ±{MAX_PTS}")
            times, shown = _by_time(known, tail, stream.time_base, rates)
            last_s = (shown[-1] + times.tail_ticks) * stream.time_base
        missing = missing_frames(container, stream, times, last_s)
    if times.length_s > MAX_LENGTH_S:
        raise MediaRejected(
            f"{source.name} claims to last {float(times.length_s):.0f} s, at most {MAX_LENGTH_S} are allowed"
        )
    orientation = _orientation(source)
    if orientation in ON_ITS_SIDE:
        height, width = width, height
    return PacketIndex(
        times, shown, array("q", sorted(keyframes) if shown else ()), height, width, orientation, missing
    )


def _by_time(
    pts: list[int], tail: int, time_base: Fraction, rates: tuple[Fraction, ...]
) -> tuple[FrameTimes, array[int]]:
    shown = array("q", sorted(set(pts)))
    ticks = array("q", (each - shown[0] for each in shown))
    if tail <= 0:
        mean = Fraction(ticks[-1], len(ticks) - 1) if len(ticks) > 1 else 1 / ((*rates, _FALLBACK_RATE)[0] * time_base)
        tail = max(1, round(mean))
    return FrameTimes(ticks, tail, time_base, rates), shown


def _by_order(frames: int, rates: tuple[Fraction, ...]) -> FrameTimes:
    rate = (*rates, _FALLBACK_RATE)[0]
    return FrameTimes(range(frames), 1, 1 / rate, (rate,))


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
        raise MediaRejected(f"{source.name} uses an unsupported codec")
    height, width = stream.codec_context.height, stream.codec_context.width
    if height < 1 or width < 1:
        raise MediaRejected(f"{source.name} does not declare its frame size: it is damaged or not a video")
    check_frame_size(source.name, height, width)
    return height, width


def check_frame_size(name: str, height_px: int, width_px: int) -> None:
    """Raises MediaRejected for frames of more than MAX_FRAME_PX pixels."""
    if height_px * width_px > MAX_FRAME_PX:
        raise MediaRejected(f"{name} has frames of {width_px}×{height_px} pixels, at most {MAX_FRAME_PX} are allowed")


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
