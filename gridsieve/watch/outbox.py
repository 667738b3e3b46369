"""Events on their way to one sink: in order for each camera, tried again until they are delivered.

    put ─▶ [yard: event event …] ─▶ deliver, again after growing waits
           [door: event …]       ─▶ deliver

What waits has 64 MiB at most. Beyond that the oldest event of the camera with the most goes, is counted, and is told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gridsieve.watch.events import Event
from gridsieve.watch.waits import growing_s

MAX_WAITING_BYTES = 64 * 2**20


class Undelivered(Exception):
    """The sink could not be reached, or has no room now: the event is tried again."""


class Refused(Exception):
    """The sink does not take this event, and would not later."""


@dataclass(frozen=True, slots=True)
class Letter:
    """An event on its way. id: the event's. body: its JSON."""

    id: str
    camera: str
    body: bytes


class Sender(Protocol):
    """name: of the sink, for people."""

    name: str

    async def deliver(self, letter: Letter) -> None:
        """Returns once the sink has it. Raises Undelivered or Refused."""

    async def close(self) -> None: ...


class Outbox:
    """say: takes lines for people. group: runs what delivers. dropped: how many events no sink took."""

    def __init__(self, sender: Sender, snapshot: bool, say: Callable[[str], None], group: asyncio.TaskGroup) -> None:
        self.dropped = 0
        self._sender, self._snapshot, self._say, self._group = sender, snapshot, say, group
        self._waiting: dict[str, deque[Letter]] = {}  # by camera; the first one is being delivered
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._bytes = 0
        self._why = ""  # the sink takes no events now; empty: it does

    def put(self, event: Event) -> None:
        letter = Letter(event.id, event.camera, event.json(self._snapshot))
        self._waiting.setdefault(event.camera, deque()).append(letter)
        self._bytes += len(letter.body)
        while self._bytes > MAX_WAITING_BYTES and self._drop():
            pass
        if event.camera not in self._tasks:
            self._tasks[event.camera] = self._group.create_task(self._deliver(event.camera))

    async def close(self, within_s: float) -> int:
        """Delivers what waits, and ends. Returns how many events were dropped since it began."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=within_s)
        for task in self._tasks.values():
            task.cancel()
        left = sum(map(len, self._waiting.values()))
        self.dropped += left
        if left:
            self._say(f"{self._sender.name}: {left} events were not delivered")
        await self._sender.close()
        return self.dropped

    def failed(self, why: str) -> None:
        """The sink does not take events now: told once, until it works again."""
        if not self._why:
            self._say(f"{self._sender.name}: {why}")
        self._why = why

    async def _deliver(self, camera: str) -> None:
        lane = self._waiting[camera]
        while lane:
            await self._try(lane[0])
            self._bytes -= len(lane.popleft().body)
        del self._waiting[camera], self._tasks[camera]

    async def _try(self, letter: Letter) -> None:
        for wait_s in growing_s():
            try:
                await self._sender.deliver(letter)
            except Undelivered as error:
                self.failed(f"events wait: {error}")
                await asyncio.sleep(wait_s)
            except Refused as error:
                self.dropped += 1
                self.failed(f"refuses events: {error}")
                return
            else:
                if self._why:
                    dropped = f"; {self.dropped} events were dropped so far" if self.dropped else ""
                    self._say(f"{self._sender.name}: delivers again{dropped}")
                self._why = ""
                return

    def _drop(self) -> bool:
        """Drops the oldest event that is not being delivered, of the camera that has most. False if there is none."""
        lane = max(self._waiting.values(), key=len)
        if len(lane) == 1:
            return False
        self._bytes -= len(lane[1].body)
        del lane[1]
        if not self.dropped:
            self._say(f"{self._sender.name}: drops the oldest events: {MAX_WAITING_BYTES >> 20} MiB wait")
        self.dropped += 1
        return True
