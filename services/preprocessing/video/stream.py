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
from urllib.parse import urlsplit

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from framesieve.common.contract.errors import MediaRejected
from framesieve.common.contract.limits import MAX_RAW_PIXELS
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
_PROBING = {"probesize": str(2**20), "analyzeduration": "1000000"}
# Packets come in the one connection that is made, and tracks without video are not asked for. Without "rtsp" among the
# protocols, FFmpeg follows no redirect. No frames are waited for to find out their rate.
_PLAYING = {
    "protocol_whitelist": "tcp",
    "rtsp_transport": "tcp",
    "allowed_media_types": "video",
    "fpsprobesize": "0",
}
_REMEDY = "send what can be read without seeking: MPEG-TS, fragmented MP4 or WebM"
# Searched for a display matrix.
_HEAD_BYTES = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class StreamFrame:
    """pixels: uint8 [H, W, 3], RGB, upright, square pixels. time_us: on the stream's clock, in microseconds."""

    pixels: UInt8Array
    time_us: int


def stream_frames(more: Callable[[], bytes], fps: float, name: str) -> Generator[StreamFrame, None, None]:
    """The frames of a stream that are used, as they come.

    more: waits for the next bytes; empty once the stream has ended. name: of the stream, for error texts.
    Raises MediaRejected for bytes that are no video, or where reading cannot go on.
    """
    file = _Bytes(more)
    try:
        container = av.open(file, mode="r", options=OPEN_OPTIONS | _PROBING, metadata_errors="replace")
    except MemoryError:
        raise
    except (av.FFmpegError, ValueError) as error:
        if unread := unread_format(io.BytesIO(file.head)):
            raise MediaRejected(f"is {unread}", field=name) from error
        raise MediaRejected(f"cannot be read as a video: {reason_of(error)}", field=name, remedy=_REMEDY) from error
    with container:
        yield from opened_frames(container, fps, name, turned=may_be_turned(io.BytesIO(file.head)))


def played_frames(
    url: str, fps: float, name: str, came: Callable[[bool], None] = lambda _: None
) -> Generator[StreamFrame, None, None]:
    """As `stream_frames`, of what an RTSP server plays.

    url: with a user name and a password, if it asks for them. came: called once it is open, which takes some packets,
    and with each packet after that; with False at the end.
    """
    try:
        container = av.open(url, mode="r", format="rtsp", options=_PLAYING | _PROBING, metadata_errors="replace")
    except MemoryError:
        raise
    except av.error.HTTPUnauthorizedError:
        text, remedy = "asks for another user name or password", None
        if "@" not in urlsplit(url).netloc:
            text, remedy = "asks for a user name and a password", "name them: rtsp://user:password@host/path"
        raise MediaRejected(text, field=name, remedy=remedy) from None
    except (av.FFmpegError, ValueError) as error:  # whose texts may hold the password
        raise MediaRejected(f"cannot be played: {reason_of(error)}", field=name) from None
    with container:
        came(True)
        yield from opened_frames(container, fps, name, turned=False, came=came)


def opened_frames(
    container: InputContainer, fps: float, name: str, turned: bool, came: Callable[[bool], None] = lambda _: None
) -> Generator[StreamFrame, None, None]:
    """As `stream_frames`, of what is open. turned: as in `_Pictures`. came: as in `played_frames`."""
    intervals, clock = Intervals(fps), _Clock()
    stream = video_stream(container, name)
    if stream.codec_context is None:
        raise MediaRejected("uses an unsupported codec", field=name)
    # Threads that decode frames side by side would hold frames back.
    stream.codec_context.thread_count = 1
    pictures = _Pictures(stream, turned, name)
    for frame in _decoded(container, stream, name, came):
        pictures.see(frame)
        pts = frame.pts  # FFmpeg gives none to the first packet of RTP
        if container.format.name in _UNTIMED:
            pts, frame.time_base = time.monotonic_ns(), Fraction(1, 10**9)
        if pts is None or frame.time_base is None or frame.is_corrupt:
            continue
        time_us = clock.shown(round(pts * frame.time_base * _TICKS_PER_S))
        if intervals.begins_one(time_us):
            yield StreamFrame(pictures.of(frame), time_us)


class _Bytes:
    """What PyAV reads. head: the first bytes that came."""

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


def _decoded(
    container: InputContainer, stream: VideoStream, name: str, came: Callable[[bool], None]
) -> Iterator[VideoFrame]:
    packets, codec = container.demux(stream), decoder_of(stream)
    began = False
    while True:
        try:
            packet = next(packets, None)
        except IndexError:  # raised by PyAV at a packet of a stream that the header did not announce
            packets = container.demux(stream)
            continue
        except av.FFmpegError as error:
            remedy = None if began or container.format.name == "rtsp" else _REMEDY
            text = f"cannot be read any further: {reason_of(error)}"
            raise MediaRejected(text, field=name, remedy=remedy) from error
        if packet is None:
            return
        came(packet.size > 0)
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
    """Makes pictures of a stream's frames, whose size may change.

    turned: whether the stream's header has a display matrix.
    """

    def __init__(self, stream: VideoStream, turned: bool, name: str) -> None:
        self._stream, self._turned, self._name = stream, turned, name
        self._converter = RgbConverter(name)
        self._aspect = stream.sample_aspect_ratio
        self._coded_aspect: Fraction | None = None
        self._began = False

    def see(self, frame: VideoFrame) -> None:
        """Call it with each frame, also with those of which no picture is made.

        What a container declares goes before what its video does, until that changes. The decoder's own may have
        changed while frames before the change still come: it counts from the next key frame on.
        """
        if self._began and not frame.key_frame:
            return
        coded_aspect = self._stream.codec_context.sample_aspect_ratio
        if self._began and coded_aspect != self._coded_aspect:
            self._aspect = coded_aspect
        self._began, self._coded_aspect = True, coded_aspect

    def of(self, frame: VideoFrame) -> UInt8Array:
        pixels = self._converter.rgb(frame)
        size = self._sent_size(frame)
        if size != (frame.width, frame.height):
            pixels = np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
        return upright(pixels, orientation_of(frame) if self._turned else UPRIGHT)

    def _sent_size(self, frame: VideoFrame) -> tuple[int, int]:
        """Width and height with square pixels, within the largest size that is sent, before it is turned upright."""
        aspect = self._aspect or 1
        width = max(1, round(frame.width * aspect)) if aspect > 0 else frame.width
        check_frame_size(self._name, frame.height, width)
        shrink = max(1.0, math.sqrt(frame.height * width / MAX_RAW_PIXELS))
        return max(1, math.floor(width / shrink)), max(1, math.floor(frame.height / shrink))
