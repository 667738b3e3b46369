"""The live sessions that are open, and what they share: blocks of the KV cache, and room for pictures on the host.

    used longest ago ▶ [idle][idle][in use][in use] ◀ used last
                        ends where another session needs its blocks

    pictures   [of frames that wait, and of the last slices][kept to begin again with]
               0                    a quarter                               size_bytes
               more than a quarter: what is kept goes, then the last slices of idle sessions
               full: a frame is refused

A session is idle a minute after it was used: after its last frame, and the end of its last answer. What those that were
used longest ago have goes first.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Iterator
from typing import Protocol

from gridsieve.common.contract.errors import Overloaded
from gridsieve.services.generation.live.frames import Frame

IDLE_S = 60.0
# Of the room for pictures: beyond it, sessions keep none to begin again with.
_KEEPS = 4


class OpenSession(Protocol):
    """num_blocks: those that it owns. rests: whether it has nothing to do. over: set once its blocks are free."""

    over: asyncio.Event

    @property
    def num_blocks(self) -> int: ...

    @property
    def rests(self) -> bool: ...

    def keep_less(self) -> bool:
        """Forgets the oldest slice of those to begin again with. Returns whether there was one."""

    def give_up_pictures(self) -> None:
        """Forgets all pictures. Only while it rests."""

    def end(self, error: Exception) -> None:
        """Ends with this error, soon."""


class LiveSessions:
    """picture_bytes: room for pictures. blocks: those that sessions may own."""

    def __init__(self, picture_bytes: int, blocks: int) -> None:
        self._picture_bytes, self._blocks = picture_bytes, blocks
        self.held_bytes = 0
        self._used_s: dict[OpenSession, float] = {}  # those that were used longest ago come first

    def use(self, session: OpenSession) -> None:
        """The session is in use now."""
        self._used_s.pop(session, None)
        self._used_s[session] = time.monotonic()

    def remove(self, session: OpenSession) -> None:
        self._used_s.pop(session, None)

    def hold(self, frame: Frame) -> None:
        """Counts the frame's picture for as long as anything refers to the frame. Raises Overloaded without room."""
        size_bytes = len(frame.picture)
        self._make_room(size_bytes)
        self.held_bytes += size_bytes
        weakref.finalize(frame, self._release, size_bytes).atexit = False

    def _release(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes

    def _make_room(self, size_bytes: int) -> None:
        def exceed(limit_bytes: int) -> bool:
            return self.held_bytes + size_bytes > limit_bytes

        for session in self._used_s:
            while exceed(self._picture_bytes // _KEEPS) and session.keep_less():
                pass
        for session, _ in self._idle():
            if not exceed(self._picture_bytes // _KEEPS):
                return
            session.give_up_pictures()
        if exceed(self._picture_bytes):
            raise Overloaded(
                f"the pictures of {len(self._used_s)} live sessions have {self.held_bytes} bytes, {size_bytes} more "
                f"would exceed --media-buffer-bytes {self._picture_bytes}"
            )

    async def make_way(self, blocks: int) -> bool:
        """Ends sessions that are idle so that another one may own so many blocks, and waits until theirs are free.

        Returns False, and ends none, if that would not do.
        """
        missing = sum(each.num_blocks for each in self._used_s) + blocks - self._blocks
        ending: list[OpenSession] = []
        for session, idle_s in self._idle():
            if ending and missing <= 0:
                break
            ending.append(session)
            missing -= session.num_blocks
            why = f"the session was idle for {idle_s:.0f} s, and another one needs its tokens (--live-tokens)"
        if missing > 0 or not ending:
            return False
        for session in ending:
            session.end(Overloaded(why))
        for session in ending:
            await session.over.wait()
        return True

    def _idle(self) -> Iterator[tuple[OpenSession, float]]:
        """Those that are idle, and for how long."""
        now_s = time.monotonic()
        for session, used_s in self._used_s.items():
            if session.rests and now_s - used_s >= IDLE_S:
                yield session, now_s - used_s
