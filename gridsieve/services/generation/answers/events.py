"""The way of a request's events from the engine's thread to its RPC in the event loop.

    engine's thread   put put put ─┐ one wake-up           put ─┐
    event loop                     └▶ take take take            └▶ take
    RPC                               next: everything that has arrived since

An engine step has an event for every answer that decodes. Waking the loop for each would cost more than handling it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import monotonic_ns
from typing import TypeAlias

from gridsieve.services.generation.request.request import Event, Failed, Finished
from gridsieve.services.generation.upstream.arriving_item import Progress

# When it happened, on the monotonic clock; the index of its answer; the event, or why the request failed.
Dated: TypeAlias = tuple[int, int, Event | Progress | Exception]


class Inbox:
    """Events of all requests that have left the engine's thread. Belongs to the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived: deque[tuple[Events, Dated]] = deque()
        self._woken = False

    def put(self, events: Events, dated: Dated) -> None:
        """Called in the engine's thread."""
        self._arrived.append((events, dated))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._woken = False  # first: an event that arrives from now on wakes the loop again
        while self._arrived:
            events, dated = self._arrived.popleft()
            events.append(dated)


class Events:
    """An unbounded queue of the events of one request. Never blocks the engine.

    ended: set once the engine has finished all answers, even if their events are still unread.
    """

    def __init__(self, inbox: Inbox, answers: int) -> None:
        self.ended = asyncio.Event()
        self._inbox = inbox
        self._unfinished = answers
        self._unread: list[Dated] = []
        self._arrived = asyncio.Event()

    def put(self, event: Progress | Exception) -> None:
        """Called in the event loop."""
        self.append((monotonic_ns(), 0, event))

    def listener(self, index: int) -> Callable[[Event], None]:
        """The callback of one answer, called in the engine's thread, whose time is recorded."""
        return lambda event: self._inbox.put(self, (monotonic_ns(), index, event))

    def append(self, dated: Dated) -> None:
        self._unread.append(dated)
        self._arrived.set()
        if isinstance(dated[2], (Finished, Failed)):
            self._unfinished -= 1
            if not self._unfinished:
                self.ended.set()

    async def next(self) -> list[Dated]:
        """Everything that has arrived since the last call, in order; waits until there is something."""
        await self._arrived.wait()
        self._arrived.clear()
        unread, self._unread = self._unread, []
        return unread
