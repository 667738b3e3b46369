"""Reads video that has no end: frames come while it is read, one in each interval of time.

    bytes     ─▶ packets ─▶ frames     a b c d e f g h
    sent                               a     d     g        at their times; an interval is 1 / fps

Nothing is known of what follows, so there is no index: packets are decoded as they come, and nothing is sought. A
packet that cannot be decoded is left out. It knows neither networks nor who asks.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from framesieve.common.contract.errors import MediaRejected
from framesieve.common.contract.limits import MAX_RAW_PIXELS
from framesieve.services.preprocessing.sources.form import Form
from framesieve.services.preprocessing.video.orientation import UPRIGHT, may_be_turned, orientation_of, upright
from framesieve.services.preprocessing.video.packets import (
    OPEN_OPTIONS,
    check_frame_size,
    decoder_of,
    reason_of,
    video_stream,
)
from framesieve.services.preprocessing.video.resize import UInt8Array
from framesieve.services.preprocessing.video.rgb import RgbConverter
from framesieve.services.preprocessing.video.unread_formats import unread_format

# Formats without times: JPEGs one after the other, as cameras send them by HTTP, and raw streams. Their frames have the
# times at which they come.
_UNTIMED = ("mpjpeg", "mjpeg", "jpeg_pipe", "h264", "hevc")
# A clock that leaps further has begun again.
_LEAP_S = 24 * 3600
_TICKS_PER_S = 1_000_000
# A clock that begins beyond it begins at 0.
_MAX_TIME_US = 2**53
# Read before the first frame is decoded, to find out what a stream holds.
_PROBED_BYTES, _PROBED_US = 2**20, 1_000_000
_REMEDY = "send what can be read without seeking: MPEG-TS, fragmented MP4 or WebM"
# Searched for a display matrix.
_HEAD_BYTES = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class StreamFrame:
    """pixels: uint8 [H, W, 3], RGB, upright, square pixels. time_us: on the stream's clock, in microseconds."""

    pixels: UInt8Array
    time_us: int


def stream_frames(more: Callable[[], bytes], form: Form, fps: float, name: str) -> Generator[StreamFrame, None, None]:
    """The frames of a stream that are used, as they come.

    more: waits for the next bytes; empty once the stream has ended. name: of the stream, for error texts.
    Raises MediaRejected for bytes that are no video, or where reading cannot go on.
    """
    file: _File = _Packets(more) if form is Form.RTP else _Bytes(more)
    with _opened(file, form, name) as container:
        yield from opened_frames(container, fps, name, turned=may_be_turned(io.BytesIO(file.head)))


def opened_frames(container: InputContainer, fps: float, name: str, turned: bool) -> Generator[StreamFrame, None, None]:
    """As `stream_frames`, of what is open. turned: as in `_Pictures`."""
    intervals, clock = Intervals(fps), _Clock()
    stream = video_stream(container, name)
    if stream.codec_context is None:
        raise MediaRejected("uses an unsupported codec", field=name)
    # Threads that decode frames side by side would hold frames back.
    stream.codec_context.thread_count = 1
    pictures = _Pictures(stream, turned, name)
    # FFmpeg counts the times of RTP from the first packet on, to which it gives none.
    first_pts = 0 if container.format.name == "sdp" else None
    for frame in _decoded(container, stream, name):
        pts, first_pts = first_pts if frame.pts is None else frame.pts, None
        if container.format.name in _UNTIMED:
            pts, frame.time_base = time.monotonic_ns(), Fraction(1, 10**9)
        if pts is None or frame.time_base is None or frame.is_corrupt:
            continue
        time_us = clock.shown(round(pts * frame.time_base * _TICKS_PER_S))
        if intervals.begins_one(time_us):
            yield StreamFrame(pictures.of(frame), time_us)


class _File(Protocol):
    """What PyAV reads. head: the first bytes that came."""

    head: bytes

    def read(self, size: int) -> bytes: ...


class _Bytes:
    def __init__(self, more: Callable[[], bytes]) -> None:
        self._more = more
        self._rest = memoryview(b"")
        self.head = b""

    def read(self, size: int) -> bytes:
        if not self._rest:
            self._rest = memoryview(self._more())
        part, self._rest = bytes(self._rest[:size]), self._rest[size:]
        if len(self.head) < _HEAD_BYTES:
            self.head += part[: _HEAD_BYTES - len(self.head)]
        return part


class _Packets:
    """The description, then one packet for each read. The description ends twice, as FFmpeg asks once more.

    Times of packets are moved so that the first one has 1: FFmpeg takes 0 for none.
    """

    def __init__(self, more: Callable[[], bytes]) -> None:
        self._more = more
        self._described = False
        self._ends = 2
        self._moved: int | None = None
        self._rest = memoryview(b"")
        self.head = b""

    def read(self, size: int) -> bytes:
        if not self._described:
            self._described = True
            return self._more()[:size]
        if self._ends:
            self._ends -= 1
            return b""
        if not self._rest:
            self._rest = memoryview(self._more())
        length = int.from_bytes(self._rest[:2])
        packet, self._rest = bytearray(self._rest[2 : 2 + length]), self._rest[2 + length :]
        if packet:
            ticks = int.from_bytes(packet[4:8])
            self._moved = 1 - ticks if self._moved is None else self._moved
            packet[4:8] = ((ticks + self._moved) % 2**32).to_bytes(4)
        return bytes(packet[:size])


def _opened(file: _File, form: Form, name: str) -> InputContainer:
    options = OPEN_OPTIONS | {"probesize": str(_PROBED_BYTES), "analyzeduration": str(_PROBED_US)}
    given = None
    if form is Form.RTP:
        given, options = "sdp", options | {"sdp_flags": "custom_io"}  # packets are read from the file as well
    try:
        return av.open(file, mode="r", format=given, options=options)
    except MemoryError:
        raise
    except (av.FFmpegError, ValueError) as error:
        if unread := unread_format(io.BytesIO(file.head)):
            raise MediaRejected(f"is {unread}", field=name) from error
        raise MediaRejected(f"cannot be read as a video: {reason_of(error)}", field=name, remedy=_REMEDY) from error


def _decoded(container: InputContainer, stream: VideoStream, name: str) -> Iterator[VideoFrame]:
    packets, codec = container.demux(stream), decoder_of(stream)
    began = False
    while True:
        try:
            packet = next(packets, None)
        except IndexError:  # raised by PyAV at a packet of a stream that the header did not announce
            packets = container.demux(stream)
            continue
        except av.FFmpegError as error:
            text, remedy = f"cannot be read any further: {reason_of(error)}", None if began else _REMEDY
            raise MediaRejected(text, field=name, remedy=remedy) from error
        if packet is None:
            return
        try:
            frames = codec.decode(packet)
        except MemoryError:
            raise
        except av.FFmpegError:
            continue
        began |= bool(frames)
        yield from frames


class _Clock:
    """A stream's times, which go on where its clock falls back or leaps."""

    def __init__(self) -> None:
        self._shift_us = 0
        self._last_us: int | None = None

    def shown(self, time_us: int) -> int:
        first_us = time_us if abs(time_us) <= _MAX_TIME_US else 0
        last_us = first_us if self._last_us is None else self._last_us
        if not last_us <= time_us + self._shift_us <= last_us + _LEAP_S * _TICKS_PER_S:
            self._shift_us = last_us - time_us
        self._last_us = time_us + self._shift_us
        return self._last_us


class Intervals:
    """Intervals of 1 / fps from the first frame on. Generation's `Frames` counts alike."""

    def __init__(self, fps: float) -> None:
        self._fps = fps
        self._origin_us: int | None = None
        self._last = -1

    def begins_one(self, time_us: int) -> bool:
        """Whether the frame is the first of an interval."""
        if self._origin_us is None:
            self._origin_us = time_us
        # The tick after it: 0.29 · 100 is below 29.
        interval = math.floor(((time_us - self._origin_us) / _TICKS_PER_S + 1 / _TICKS_PER_S) * self._fps)
        if interval <= self._last:
            return False
        self._last = interval
        return True


class _Pictures:
    """Makes pictures of a stream's frames, all of the first one's size.

    turned: whether the stream's header has a display matrix.
    """

    def __init__(self, stream: VideoStream, turned: bool, name: str) -> None:
        self._stream, self._turned, self._name = stream, turned, name
        self._converter = RgbConverter(name)
        self._size: tuple[int, int] | None = None  # width and height of the first frame, before it is turned upright

    def of(self, frame: VideoFrame) -> UInt8Array:
        pixels = self._converter.rgb(frame)
        self._size = self._size or self._sent_size(frame)
        if self._size != (frame.width, frame.height):
            pixels = np.asarray(Image.fromarray(pixels).resize(self._size, Image.Resampling.BICUBIC))
        return upright(pixels, orientation_of(frame) if self._turned else UPRIGHT)

    def _sent_size(self, frame: VideoFrame) -> tuple[int, int]:
        """Width and height with square pixels, within the largest size that is sent."""
        aspect = self._stream.sample_aspect_ratio or 1
        width = max(1, round(frame.width * aspect)) if aspect > 0 else frame.width
        check_frame_size(self._name, frame.height, width)
        shrink = max(1.0, math.sqrt(frame.height * width / MAX_RAW_PIXELS))
        return max(1, math.floor(width / shrink)), max(1, math.floor(frame.height / shrink))
