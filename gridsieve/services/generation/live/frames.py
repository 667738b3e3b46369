"""The frames of a live session on their way to slices: sampled by time, paired, and what waits for its turn.

    came      |a  b |c  d |e  f |g  h |       an interval is 1 / fps
    used      |a    |c    |e    |g    |
    slices    (a     c)    (e     g)          the newest one takes the place of one that waits

It knows neither grpc nor the engine.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from fractions import Fraction
from itertools import takewhile
from typing import Generic, TypeVar

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.limits import MAX_INLINE_BYTES, MAX_PICTURE_BYTES

MAX_LENGTH_S = 7 * 24 * 3600
# Frames of a slice, as in videos of these families.
SLICE_FRAMES = 2
# The pictures of slices that wait: at least those of two slices.
MAX_WAITING_BYTES = MAX_INLINE_BYTES
# How many slices that come while a question is answered may wait for its end.
MAX_HELD = 8
US_PER_S = 1_000_000

T = TypeVar("T")


class DropReason(Enum):
    """Why frames are not used, see the message of this name."""

    LATE = "late"
    UNAVAILABLE = "unavailable"
    REFUSED = "refused"
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Frame:
    """picture: the file. time_us: since the session's first frame, in microseconds. given_s: as the caller said.
    number: of frames that came before it. wall_s: when it was filmed, in seconds since 1970: by the camera's own clock
    (`by_camera`), else when it came. came_ns: when it came, on this host's monotonic clock."""

    picture: bytes | bytearray
    time_us: int
    given_s: float
    number: int = 0
    wall_s: float = 0.0
    by_camera: bool = False
    came_ns: int = 0


@dataclass(frozen=True, slots=True)
class FramePair:
    """The two frames of a slice, which may show the same picture. used: how many that came are in it. stream: the
    number of the stream that both are of."""

    first: Frame
    last: Frame
    used: int = SLICE_FRAMES
    stream: int = 0

    @property
    def time_us(self) -> int:
        """When its last frame came."""
        return (self.first if self.used == 1 else self.last).time_us

    @property
    def size_bytes(self) -> int:
        return len(self.first.picture) + len(self.last.picture)

    def showing(self, first: bytes | bytearray, last: bytes | bytearray) -> FramePair:
        """Other pictures at its times."""
        return replace(self, first=replace(self.first, picture=first), last=replace(self.last, picture=last))

    def repeats(self, other: FramePair) -> bool:
        """Whether it shows the same files."""
        return (self.first.picture, self.last.picture) == (other.first.picture, other.last.picture)


def microseconds(seconds: float) -> int:
    """Times in whole microseconds, so that their differences are exact. seconds: finite."""
    return round(Fraction(seconds) * US_PER_S)


class Frames:
    """Pairs the frames that are used. hold: called with each of them; raises Overloaded for lack of room."""

    def __init__(self, fps: float, hold: Callable[[Frame], None] = lambda _: None) -> None:
        self._fps, self._hold = Fraction(fps), hold
        self._origin_s: float | None = None
        self._given_s = -math.inf
        self._interval = -1
        self._lone: Frame | None = None
        self._stream = 0

    def pair(
        self, picture: bytes | bytearray, time_s: float, number: int = 0, filmed_s: float | None = None
    ) -> FramePair | None:
        """The pair that a frame completes. filmed_s: by the camera's own clock, if it tells.

        Raises InvalidRequest for its time, and for no or too large a picture, and Overloaded where it has no room.
        """
        if not 1 <= len(picture) <= MAX_PICTURE_BYTES:
            limit = f"1 to {MAX_PICTURE_BYTES} bytes"
            raise InvalidRequest(field="frame.picture", limit=limit, value=f"{len(picture)} bytes")
        if not (math.isfinite(time_s) and time_s >= self._given_s):
            limit = "finite" if math.isinf(self._given_s) else f"finite, and at least that before it, {self._given_s:g}"
            raise InvalidRequest(field="frame.time_s", limit=limit, value=time_s)
        if self._origin_s is None:
            self._origin_s = time_s
        if time_s - self._origin_s > MAX_LENGTH_S:
            limit = f"within {MAX_LENGTH_S} s of the first frame's, {self._origin_s:g}"
            raise InvalidRequest(field="frame.time_s", limit=limit, value=time_s)
        since_us = microseconds(time_s) - microseconds(self._origin_s)
        self._given_s = time_s
        # A microsecond after it: a third of a second is 333,333 of them.
        interval = (since_us + 1) * self._fps // US_PER_S
        if interval <= self._interval:
            return None
        wall_s = time.time() if filmed_s is None else filmed_s
        frame = Frame(picture, since_us, time_s, number, wall_s, filmed_s is not None, time.monotonic_ns())
        self._hold(frame)
        self._interval = interval
        if self._lone is None:
            self._lone = frame
            return None
        whole, self._lone = FramePair(self._lone, frame, stream=self._stream), None
        return whole

    def give_up(self) -> int:
        """Forgets the frame that waits for another one. Returns the number of such frames."""
        lone, self._lone = self._lone, None
        return int(lone is not None)

    def flush(self) -> FramePair | None:
        """The frame that waits for another one, if there is one: it is shown twice."""
        lone, self._lone = self._lone, None
        if lone is None:
            return None
        return FramePair(lone, replace(lone, time_us=lone.time_us + 1), used=1, stream=self._stream)

    def end_stream(self) -> FramePair | None:
        """As `flush`. The frames that follow are another stream's, and share no slice with those before them."""
        lone, self._stream = self.flush(), self._stream + 1
        return lone


class Waiting(Generic[T]):
    """Slices and questions that wait, in order. After the last question one slice waits, of which a newer slice takes
    the place. More slices wait after an answer: those that came while it was generated, at most MAX_HELD. The pictures
    of all slices have at most MAX_WAITING_BYTES; the oldest slices go first.

    drop: called with each slice whose place a newer one took.
    """

    def __init__(self, drop: Callable[[FramePair], None]) -> None:
        self._drop = drop
        self._all: deque[FramePair | T] = deque()
        self._held = 0  # slices that may wait beside the newest one

    def __len__(self) -> int:
        return len(self._all)

    @property
    def size_bytes(self) -> int:
        """Of all pictures."""
        return sum(each.size_bytes for each in self._all if isinstance(each, FramePair))

    def enqueue(self, pair: FramePair, answering: bool = False) -> None:
        """Lets the newest slice wait. answering: whether a question is answered meanwhile."""
        last = list(takewhile(lambda each: isinstance(each, FramePair), reversed(self._all)))
        if answering and self._held < MAX_HELD:
            self._held += 1
        elif len(last) > self._held:
            replaced = self._all.pop()
            assert isinstance(replaced, FramePair)
            self._drop(replaced)
        self._all.append(pair)
        self._drop_oldest()

    def ask(self, question: T, before: FramePair | None) -> None:
        """Lets a question wait, and before it a slice that is not to replace another."""
        if before:
            self._all.append(before)
            self._drop_oldest()
        self._all.append(question)

    def ask_now(self, question: T) -> None:
        """Puts a question before everything that waits."""
        self._all.appendleft(question)

    def take(self) -> FramePair | T:
        first = self._all.popleft()
        self._held = max(0, self._held - isinstance(first, FramePair))
        return first

    def take_oldest_slice(self) -> FramePair:
        """The oldest of the slices, of which there is one at least."""
        oldest = next(each for each in self._all if isinstance(each, FramePair))
        self._all.remove(oldest)
        return oldest

    def _drop_oldest(self) -> None:
        while self.size_bytes > MAX_WAITING_BYTES:
            self._drop(self.take_oldest_slice())
