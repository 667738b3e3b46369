"""The gateway's end: it refuses new requests, lets running ones finish within a grace period, and cuts off the rest.

A request that is cut off is told so: by its status, or by the last event of its stream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from gridsieve.common.contract.errors import Unavailable

# Time that requests which are cut off get to tell their clients.
_TELL_S = 1.0

T = TypeVar("T")


class Drain:
    """The state of a gateway that drains, or will."""

    def __init__(self) -> None:
        self.begun = False
        self._over = False
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._limits: set[asyncio.Timeout] = set()

    async def finish(self, grace_s: float) -> int:
        """Begins to drain. Returns, after `grace_s` at the latest, how many requests were cut off."""
        self.begun = True
        if await self._idle_within(grace_s):
            return 0
        cut_off, self._over = self._running, True
        for limit in self._limits:
            limit.reschedule(asyncio.get_running_loop().time())
        await self._idle_within(_TELL_S)
        return cut_off

    async def _idle_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the request that runs inside."""
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    @asynccontextmanager
    async def limited(self) -> AsyncGenerator[asyncio.Timeout]:
        """Cancels what runs inside once the grace period is over, and raises Unavailable for it; see `lift`."""
        if self._over:
            raise _too_late()
        try:
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                try:
                    yield limit
                finally:
                    self.lift(limit)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise _too_late() from error

    def lift(self, limit: asyncio.Timeout) -> None:
        """Lets what runs inside `limited` go on: its response has begun, and must tell of its end itself."""
        self._limits.discard(limit)

    async def until_over(self, events: AsyncIterator[T]) -> AsyncGenerator[T]:
        """The events. Raises Unavailable once the grace period is over."""
        while True:
            async with self.limited():
                try:
                    event = await anext(events)
                except StopAsyncIteration:
                    return
            yield event


def _too_late() -> Unavailable:
    return Unavailable("gateway is draining, and its grace period is over", "gateway")
