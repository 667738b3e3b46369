"""The events of a live session, in the order in which they happen.

    LiveSlice …  LiveDelta* LiveFinished  LiveSlice …      one answer at a time; others may come between its parts

It knows nothing of protobuf (see `events`). Times are the caller's, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from gridsieve.client.answer import Answer, Delta
from gridsieve.common.contract.errors import GridsieveError
from gridsieve.common.contract.plan import Grid, Int32Array


class WallClock(Enum):
    """Whose clock says when a frame was filmed: the CAMERA's own, which RTSP cameras may send, or the SERVICE's, when
    the frame came."""

    CAMERA = "camera"
    SERVICE = "service"


@dataclass(frozen=True, slots=True)
class Filmed:
    """When a frame was filmed. wall_time_s: in seconds since 1970 (UTC). snapshot: the frame as a picture file, JPEG
    unless the caller sent another one; empty unless `snapshots` asks for it."""

    wall_time_s: float
    wall_clock: WallClock
    snapshot: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class LiveUsage:
    """The sums of a session since it was opened.

    frames: that came. used_frames: of them. dropped_frames: that were late, or lost; the others came sooner than fps
        asks for, or wait.
    media_tokens_full, media_tokens: of slices, before and after pruning. completion_tokens: of answers.
    evicted_tokens: of segments that went. held_tokens: those that the session holds now.
    """

    frames: int
    used_frames: int
    dropped_frames: int
    media_tokens_full: int
    media_tokens: int
    completion_tokens: int
    evicted_tokens: int
    held_tokens: int


@dataclass(frozen=True, slots=True)
class LiveDelta:
    """The next part of an answer. ask_id: see `LiveFinished`."""

    ask_id: str
    delta: Delta


@dataclass(frozen=True, slots=True)
class LiveFinished:
    """An answer is finished.

    ask_id: its question's: "ask-0" of the first that was asked, "trigger-0" of the first trigger.
    answer: whole. Its prompt_tokens are all that the session holds, cached_prompt_tokens those before the question.
    seen_s: the time of the last frame before the question; None before any. filmed: that frame.
    """

    ask_id: str
    question: str
    answer: Answer
    seen_s: float | None
    usage: LiveUsage
    filmed: Filmed | None = None


@dataclass(frozen=True, slots=True)
class LiveRefused:
    """A question is not answered, and the session goes on. ask_id: see `LiveFinished`.

    error: InvalidRequest for what it asks, Unavailable where a service was away: it can be asked again.
    """

    ask_id: str
    question: str
    error: GridsieveError


@dataclass(frozen=True, slots=True, eq=False)
class LiveSlice:
    """A slice was added: frames that share their tokens.

    first_time_s, last_time_s: of its first and its last frame.
    grid: its tokens before pruning; t is 1. kept: int32 [K], strictly increasing indices of those that stayed.
    filmed: its last frame.
    """

    first_time_s: float
    last_time_s: float
    grid: Grid
    kept: Int32Array
    usage: LiveUsage
    filmed: Filmed | None = None


@dataclass(frozen=True, slots=True)
class LiveEvicted:
    """The oldest segments (slices, and questions with their answers) left the window. tokens: that were freed."""

    segments: int
    tokens: int


class DropReason(Enum):
    """Why frames were not used: LATE, because newer ones came before there was time for them, UNAVAILABLE, because the
    encoder or preprocessing could not be reached, REFUSED, because they cannot be read or have a wrong time, NO_ROOM,
    because a service has no room for them."""

    LATE = "late"
    UNAVAILABLE = "unavailable"
    REFUSED = "refused"
    NO_ROOM = "no_room"


@dataclass(frozen=True, slots=True)
class LiveDropped:
    """Frames were not used. frames: how many since the last such event. error: why they were refused, or empty."""

    frames: int
    reason: DropReason
    error: str = ""


@dataclass(frozen=True, slots=True)
class LiveRestarted:
    """The session begins again from its last segments: its positions came to the end of what the model knows, or the
    window of a model with a recurrent state is full.

    segments: with how many of the last it begins.
    """

    segments: int


class StreamState(Enum):
    """What happened to the encoded video of a session: ENDED, or LOST. Then a source is opened again, and of clips one
    that begins another stream is waited for. PLAYING: the first frame of a source has come, or the first one after it
    was opened again."""

    ENDED = "ended"
    LOST = "lost"
    PLAYING = "playing"


class Snapshots(Enum):
    """With which events of a session a picture of the last frame comes: with each answer, or with each slice, too."""

    ANSWERS = "answers"
    SLICES = "slices"


@dataclass(frozen=True, slots=True)
class LiveStream:
    """The source or the clips came to an end, or broke off. reason: why, for people; at an end empty, unless the
    session takes no more of it."""

    state: StreamState
    reason: str


LiveEvent: TypeAlias = (
    LiveDelta | LiveFinished | LiveRefused | LiveSlice | LiveEvicted | LiveDropped | LiveRestarted | LiveStream
)
