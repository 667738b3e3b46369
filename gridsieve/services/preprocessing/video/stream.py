"""Reads video that has no end: frames come while it is read, one in each interval of time.

    bytes     ─▶ packets ─▶ frames     a b c d e f g h
    sent                               a     d     g        at their times; an interval is 1 / fps

Nothing is known of what follows, so there is no index: packets are decoded as they come, and nothing is sought. A
packet that cannot be decoded is left out. It knows neither networks nor who asks.
"""

from __future__ import annotations

import io
import math
import re
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from fractions import Fraction
from urllib.parse import urlsplit

import av
import numpy as np
from av.container import InputContainer
from av.packet import Packet
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from gridsieve.common.contract.errors import MediaRejected
from gridsieve.common.contract.limits import MAX_RAW_PIXELS
from gridsieve.services.preprocessing.video.orientation import UPRIGHT, may_be_turned, orientation_of, upright
from gridsieve.services.preprocessing.video.packets import (
    OPEN_OPTIONS,
    check_frame_size,
    decoder_of,
    demuxed,
    reason_of,
    video_stream,
)
from gridsieve.services.preprocessing.video.resize import UInt8Array
from gridsieve.services.preprocessing.video.rgb import RgbConverter
from gridsieve.services.preprocessing.video.unread_formats import playlist, unread_format

# Formats without times: JPEGs one after the other, as cameras send them by HTTP, and raw streams. Their frames have the
# times at which they come.
_UNTIMED = ("mpjpeg", "mjpeg", "jpeg_pipe", "h264", "hevc")
# A live clock may be ahead of the host's by so much: servers send a burst of what was filmed at the beginning.
_AHEAD_S = 10
# Of a stream that may come faster than it was filmed, the longest step between two frames.
_STEP_S = 600
_TICKS_PER_S = 1_000_000
# A clock that begins beyond it begins at 0.
_MAX_TIME_US = 2**53
# Read before the first frame is decoded, to find out what a stream holds. FFmpeg makes leaps of clocks that fall.
_PROBING = {"probesize": str(2**20), "analyzeduration": "1000000", "correct_ts_overflow": "0"}
# Nothing is to be found out of JPEGs, so the first one is decoded when it has come.
_JPEGS = {"probesize": "32", "analyzeduration": "0", "fpsprobesize": "0"}
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
# They tell what is not left to FFmpeg to find out.
_FIRST_BYTES = 256
_JPEG = b"\xff\xd8\xff"
# A part of MIME's multipart, of which some cameras leave out the first boundary.
_PART = re.compile(rb"\s*(--[^\r\n]*\r?\n)?(?:[^\r\n]+\r?\n)*?content-type:[ \t]*image/jpeg[ \t]*\r?\n", re.IGNORECASE)
_BOUNDARY = b"--\r\n"


@dataclass(frozen=True, slots=True, eq=False)
class StreamFrame:
    """pixels: uint8 [H, W, 3], RGB, upright, square pixels. time_us: on the stream's clock, in microseconds.

    filmed_us: when it was filmed by the camera's clock, in microseconds since 1970, if the camera says so.
    """

    pixels: UInt8Array
    time_us: int
    filmed_us: int | None = None


def stream_frames(
    more: Callable[[], bytes], fps: float, name: str, live: bool = False, jpegs: bool = False
) -> Generator[StreamFrame, None, None]:
    """The frames of a stream that are used, as they come.

    more: waits for the next bytes; empty once the stream has ended. name: of the stream, for error texts. live: they
    come while it is filmed. jpegs: they are known to be JPEGs, one after the other, also in parts of a multipart.
    Raises MediaRejected for bytes that are no video, or where reading cannot go on.
    """
    file = _Bytes(more)
    if kind := playlist(file.first):
        raise not_watched(kind, name)
    form = file.jpeg_format(jpegs)
    options = OPEN_OPTIONS | _PROBING | (_JPEGS if form else {})
    try:
        container = av.open(file, mode="r", format=form, options=options, metadata_errors="replace")
    except MemoryError:
        raise
    except (av.FFmpegError, ValueError) as error:
        if unread := unread_format(io.BytesIO(file.head)):
            raise MediaRejected(f"is {unread}", field=name) from error
        raise MediaRejected(f"cannot be read as a video: {reason_of(error)}", field=name, remedy=_REMEDY) from error
    with container:
        try:
            yield from opened_frames(container, fps, name, turned=may_be_turned(io.BytesIO(file.head)), live=live)
        except MediaRejected:
            if form != "mpjpeg" or not file.ended:  # which the last boundary ends with an error
                raise


def not_watched(playlist: str, name: str) -> MediaRejected:
    """playlist: "HLS" or "DASH"."""
    text = f"is a playlist ({playlist}), which is not watched"
    return MediaRejected(text, field=name, remedy="name the stream itself: RTSP, or MPEG-TS or MJPEG by HTTP")


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
        yield from opened_frames(container, fps, name, turned=False, live=True, came=came)


def opened_frames(
    container: InputContainer,
    fps: float,
    name: str,
    turned: bool,
    live: bool,
    came: Callable[[bool], None] = lambda _: None,
) -> Generator[StreamFrame, None, None]:
    """As `stream_frames`, of what is open. turned: as in `_Pictures`. came: as in `played_frames`."""
    intervals, clock, reported = Intervals(fps), _Clock(time.monotonic if live else None), _Reported()
    stream = video_stream(container, name)
    if stream.codec_context is None:
        raise MediaRejected("uses an unsupported codec", field=name)
    # Threads that decode frames side by side would hold frames back.
    stream.codec_context.thread_count = 1
    pictures = _Pictures(stream, turned, name)
    for frame in _decoded(container, stream, name, came, reported):
        pictures.see(frame)
        if frame.is_corrupt:
            continue
        filmed_us = None
        if container.format.name in _UNTIMED:
            time_us = time.monotonic_ns() // 1000
        elif frame.pts is None or frame.time_base is None:  # FFmpeg gives none to the first packet of RTP
            continue
        else:
            pts_us = round(frame.pts * frame.time_base * _TICKS_PER_S)
            time_us, filmed_us = clock.shown(pts_us), reported.filmed_us(pts_us)
        if intervals.begins_one(time_us):
            yield StreamFrame(pictures.of(frame), time_us, filmed_us)


class _Bytes:
    """What PyAV reads.

    first: the first _FIRST_BYTES; fewer if there are no more, or a JPEG begins. head: the first that were read. ended:
    whether all were read.
    """

    def __init__(self, more: Callable[[], bytes]) -> None:
        self._more = more
        self.ended = False
        self.head = b""
        first = b""
        while len(first) < _FIRST_BYTES and not first.startswith(_JPEG) and (data := more()):
            first += data
        self.first, self._rest = first[:_FIRST_BYTES], memoryview(first)

    def jpeg_format(self, known: bool) -> str | None:
        """FFmpeg's format of JPEGs one after the other; None if they are none. known: that they are some."""
        part = _PART.match(self.first)
        if not part:
            return "mjpeg" if known or self.first.startswith(_JPEG) else None
        if not part[1]:
            self._rest = memoryview(_BOUNDARY + self._rest)
        return "mpjpeg"

    def read(self, size: int) -> bytes:
        if not self._rest:
            self._rest = memoryview(self._more())
            self.ended |= not self._rest
        part, self._rest = bytes(self._rest[:size]), self._rest[size:]
        if len(self.head) < _HEAD_BYTES:
            self.head += part[: _HEAD_BYTES - len(self.head)]
        return part


def _decoded(
    container: InputContainer, stream: VideoStream, name: str, came: Callable[[bool], None], reported: _Reported
) -> Iterator[VideoFrame]:
    packets, codec = demuxed(container, stream), decoder_of(stream)
    began = False
    while True:
        try:
            packet = next(packets, None)
        except av.FFmpegError as error:
            remedy = None if began or container.format.name == "rtsp" else _REMEDY
            text = f"cannot be read any further: {reason_of(error)}"
            raise MediaRejected(text, field=name, remedy=remedy) from error
        if packet is None:
            return
        came(packet.size > 0)
        reported.see(packet)
        try:
            frames = codec.decode(packet)
        except MemoryError:
            raise
        except av.FFmpegError:
            continue
        began |= bool(frames)
        yield from frames


class _Reported:
    """The camera's clock, as RTCP's sender reports tell it. Source: `AVProducerReferenceTime` of FFmpeg's defs.h."""

    def __init__(self) -> None:
        self._ahead_us: int | None = None

    def see(self, packet: Packet[VideoStream]) -> None:
        if packet.pts is None or packet.time_base is None or not packet.has_sidedata("prft"):
            return
        wall_us = int.from_bytes(bytes(packet.get_sidedata("prft"))[:8], sys.byteorder, signed=True)
        self._ahead_us = wall_us - round(packet.pts * packet.time_base * _TICKS_PER_S)

    def filmed_us(self, pts_us: int) -> int | None:
        return None if self._ahead_us is None else pts_us + self._ahead_us


class _Clock:
    """A stream's times, which go on where its clock falls back or leaps.

    A live clock leaps where a step of more than 10 s takes it more than 10 s ahead of the host's since the first frame;
    another clock, where a step has more than 10 minutes. After a fall or a leap the times go on from the last frame, by
    the time that passed at the host, or by the step before if the clock is not live. Where the clock returns to what it
    was before, so do the times: one wrong time stamp moves nothing.
    """

    def __init__(self, host_s: Callable[[], float] | None) -> None:
        """host_s: the host's clock, if the stream is live."""
        self._host_s = host_s
        self._shifts_us = (0, 0)  # the one in use, and the one before
        self._last_us: int | None = None
        self._step_us = 0
        self._first_us, self._began_us, self._came_us = 0, 0, 0

    def shown(self, time_us: int) -> int:
        now_us = round(self._host_s() * _TICKS_PER_S) if self._host_s else 0
        if self._last_us is None:
            self._last_us = self._first_us = time_us if abs(time_us) <= _MAX_TIME_US else 0
            self._shifts_us = (self._last_us - time_us, self._last_us - time_us)
            self._began_us = self._came_us = now_us
            return self._last_us
        last_us, (current_us, before_us) = self._last_us, self._shifts_us
        longest_us = _STEP_S * _TICKS_PER_S
        if self._host_s:
            passed_us = self._first_us + now_us - self._began_us - last_us
            longest_us = max(0, passed_us) + _AHEAD_S * _TICKS_PER_S
        goes_on_us = last_us + (now_us - self._came_us if self._host_s else self._step_us) - time_us
        fits = (each for each in (current_us, before_us) if 0 <= time_us + each - last_us <= longest_us)
        shift_us = min(fits, default=goes_on_us)
        if shift_us != current_us:
            self._shifts_us = (shift_us, current_us)
        self._last_us = time_us + shift_us
        self._step_us, self._came_us = self._last_us - last_us, now_us
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
