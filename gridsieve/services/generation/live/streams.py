"""The encoded video of a live session: clips that its caller sends, or a source that preprocessing opens.

    clip clip clip ─▶ Watch ─▶ frames, and how far the bytes are read
    source         ─▶ Watch ─▶ frames … lost ─▶ wait ─▶ Watch ─▶ frames …      also at its end, if it reopens

Each stream has a clock of its own. The frames of the first one have its times; those of another one go on by the time
that passed, in whole intervals of 1 / fps, because preprocessing counts its intervals from its first frame.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from enum import Enum
from fractions import Fraction
from typing import Any

import structlog

from gridsieve.common.contract.errors import (
    GridsieveError,
    InvalidRequest,
    MediaDamaged,
    MediaForbidden,
    Overloaded,
    Unavailable,
)
from gridsieve.common.contract.limits import MAX_PICTURE_BYTES
from gridsieve.services.generation.live.frames import US_PER_S, microseconds
from gridsieve.services.generation.live.source_metrics import Source
from gridsieve.services.generation.upstream.media import MediaClient
from gridsieve.services.generation.upstream.watch import Watch, WatchedFrame

FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 30.0
# What a source may do at any time, without ending the session.
_LOST = (InvalidRequest, MediaForbidden, Overloaded, Unavailable)

log = structlog.get_logger()


class StreamState(Enum):
    """See the message of this name."""

    ENDED = "ended"
    LOST = "lost"
    PLAYING = "playing"


class _Over(Exception):
    """The session takes no more frames of its streams. The text says why."""


class StreamTimes:
    """Times of the frames of several streams, one after the other, on one clock.

    now_ns: nanoseconds on any clock that never falls back.
    """

    def __init__(self, fps: float, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._interval_us, self._now_ns = US_PER_S / Fraction(fps), now_ns
        self._first_us: int | None = None
        self._last_us = self._came_us = self._shift_us = 0
        self._begins = True

    def begin(self) -> None:
        """The next frame is the first one of a stream."""
        self._begins = True

    def of(self, time_s: float) -> float:
        """The time of the next frame, to the microsecond. time_s: on the clock of its stream."""
        came_us, time_us = self._now_ns() // 1000, microseconds(time_s)
        if self._first_us is None:
            self._first_us = time_us
        elif self._begins:
            since_us = self._last_us + came_us - self._came_us - self._first_us
            intervals = math.ceil(since_us / self._interval_us)
            self._shift_us = self._first_us + math.ceil(intervals * self._interval_us) - time_us
        self._begins, self._came_us, self._last_us = False, came_us, time_us + self._shift_us
        return self._last_us / US_PER_S


class Streams:
    """The streams of one session.

    options: makes the arguments of an upstream call that begins now. see: takes each frame, with its time. end: called
    once a stream is over. tell: sends a state, and why it is so. group: runs what reads the streams; an error there
    ends the session.
    """

    def __init__(
        self,
        media: MediaClient,
        fps: float,
        options: Callable[[], dict[str, Any]],
        see: Callable[[WatchedFrame, float], None],
        end: Callable[[], None],
        tell: Callable[[StreamState, str], Awaitable[None]],
        group: asyncio.TaskGroup,
    ) -> None:
        self._media, self._fps, self._options = media, fps, options
        self._see, self._end, self._tell, self._group = see, end, tell, group
        self._times = StreamTimes(fps)
        self._source: asyncio.Task[None] | None = None
        self._clips: Watch | None = None  # None: the next clip that begins a stream is waited for
        self._reading: asyncio.Task[None] | None = None
        self._sent_bytes = self._read_bytes = 0
        self._progress = asyncio.Event()

    def watch(self, url: str, reopens: bool, source: Source) -> None:
        """Watches a source until the session is closed. reopens: whatever ends it, and before its first frame, too."""
        self._source = self._group.create_task(self._watch(url, reopens, source))

    async def send_clip(self, data: bytes, begins: bool) -> None:
        """Sends a clip to preprocessing. begins: another stream. Raises InvalidRequest for no bytes or too many."""
        if not 1 <= len(data) <= MAX_PICTURE_BYTES:
            limit = f"1 to {MAX_PICTURE_BYTES} bytes"
            raise InvalidRequest(field="clip.data", limit=limit, value=f"{len(data)} bytes")
        if begins or self._reading is None:
            await self._end_clips()
            self._sent_bytes = self._read_bytes = 0
            self._clips = self._media.watch(self._fps, "", **self._options())
            self._reading = self._group.create_task(self._read_clips(self._clips))
            await self._clips.open()
        if self._clips:
            self._sent_bytes += len(data)
            await self._clips.send(data)

    async def caught_up(self) -> None:
        """Returns when all clips so far are read, or cannot be."""
        while self._clips and self._read_bytes < self._sent_bytes:
            self._progress.clear()
            await self._progress.wait()

    async def close(self) -> None:
        """No more clips follow, and nothing more of a source: returns when the last frame was seen."""
        if self._source:
            self._source.cancel()
        await self._end_clips()

    async def _end_clips(self) -> None:
        watch, self._clips = self._clips, None
        if watch and self._reading:
            await watch.end()
            await asyncio.wait([self._reading])

    async def _read_clips(self, watch: Watch) -> None:
        self._times.begin()
        try:
            async for event in watch.events():
                if isinstance(event, WatchedFrame):
                    self._show(event)
                else:
                    self._read_bytes = event
                    self._progress.set()
            state, reason = StreamState.ENDED, ""
        except _Over as over:
            state, reason = StreamState.ENDED, str(over)
        except (InvalidRequest, Overloaded, Unavailable) as error:
            state, reason = StreamState.LOST, _named(error, "clip")
            if isinstance(error, InvalidRequest) and not isinstance(error, MediaDamaged):
                raise
            log.warning("clips of a live session were lost", error=reason)
        finally:
            watch.cancel()
            if self._clips is watch:
                self._clips = None
            self._progress.set()
        await self._tell_over(state, reason)

    async def _watch(self, url: str, reopens: bool, source: Source) -> None:
        wait_s, seen = FIRST_WAIT_S, False
        while True:
            try:
                async with aclosing(self._played(url, source)) as frames:
                    async for frame in frames:
                        self._show(frame)
                        del frame  # the source may be lost for hours
                        wait_s, seen = FIRST_WAIT_S, True
                over, reason = not reopens, "the source came to its end"
            except _Over as error:
                over, reason = True, str(error)
            except _LOST as error:
                over, reason = False, _named(error, "open.source")
                if not (seen or (reopens and _may_pass(error))):
                    raise
            if over:
                source.ended()
                await self._tell_over(StreamState.ENDED, reason)
                return
            log.warning("the source of a live session was lost", error=reason)
            source.lost()
            await self._tell_over(StreamState.LOST, reason)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    async def _played(self, url: str, source: Source) -> AsyncGenerator[WatchedFrame]:
        """The frames of a source from now on. Tells of the first one before."""
        self._times.begin()
        watch, plays = self._media.watch(self._fps, url, **self._options()), False
        try:
            await watch.open()
            async for event in watch.events():
                if isinstance(event, WatchedFrame):
                    if not plays:
                        plays = True
                        source.plays()
                        await self._tell(StreamState.PLAYING, "")
                    yield event
        finally:
            watch.cancel()

    async def _tell_over(self, state: StreamState, reason: str) -> None:
        self._end()
        await self._tell(state, reason)

    def _show(self, frame: WatchedFrame) -> None:
        try:
            self._see(frame, self._times.of(frame.time_s))
        except InvalidRequest as error:  # its time: the session is as long as it may be
            raise _Over(f"no more frames are taken: {error}") from error


def _may_pass(error: GridsieveError) -> bool:
    """Whether a source that could not be opened may be opened later. The URL and the policy stay as they are; what a
    server answers, the places for streams and preprocessing itself may change."""
    return type(error) is not InvalidRequest and not isinstance(error, MediaForbidden)


def _named(error: GridsieveError, field: str) -> str:
    """The error's text, once it names the field of a live session."""
    if not isinstance(error, Unavailable):
        error.field = field
    return str(error)
