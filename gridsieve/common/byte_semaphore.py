"""A semaphore counted in bytes, which requests reserve before they produce or receive data.

A request reserves downstream resources first, and for a whole media item at a time. It can therefore always finish
with the bytes it holds, and requests cannot deadlock. A ByteSemaphore belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from operator import itemgetter
from time import monotonic_ns

from gridsieve.common.yielding import call_yields, join_line


class ByteSemaphore:
    """FIFO: a large reservation is never overtaken by smaller ones, so it cannot starve. Those of calls that yield wait
    behind the others.

    bytes:    [held ........][free ...]
    waiting:  [6][1][2]                  1 and 2 would fit, and still wait behind 6
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self._waiting: deque[tuple[asyncio.Future[None], int, int, bool]] = deque()

    @property
    def waiting(self) -> int:
        """Number of waiting reservations. Safe from any thread."""
        return len(self._since_ns())

    @property
    def oldest_ns(self) -> int | None:
        """When the first waiting reservation began, in ns of the monotonic clock, or None. Safe from any thread."""
        return next(iter(self._since_ns()), None)

    @asynccontextmanager
    async def reserved(self, size_bytes: int) -> AsyncIterator[None]:
        """Reserves the bytes inside. A reservation of 0 bytes succeeds at once, even if others wait."""
        if size_bytes:
            await self.reserve(size_bytes)
        try:
            yield
        finally:
            self.release(size_bytes)

    async def reserve(self, size_bytes: int) -> None:
        """Waits until the bytes are free, and holds them until `release`. A cancelled call holds nothing."""
        assert size_bytes <= self.size_bytes, f"{size_bytes} of {self.size_bytes} bytes would never be free"
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        join_line(self._waiting, (admitted, size_bytes, monotonic_ns(), call_yields()), itemgetter(3))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # admitted and cancelled in the same iteration of the loop
                self.held_bytes -= size_bytes
            self._admit()
            raise

    def try_reserve(self, size_bytes: int) -> bool:
        """Holds bytes until `release` if they are free and nothing waits for them, and never waits itself."""
        fits = not self._waiting and self.held_bytes + size_bytes <= self.size_bytes
        self.held_bytes += size_bytes if fits else 0
        return fits

    def release(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes
        assert self.held_bytes >= 0, "released twice"
        self._admit()

    def _since_ns(self) -> list[int]:
        return [since_ns for admitted, _, since_ns, _ in list(self._waiting) if not admitted.done()]

    def _admit(self) -> None:
        while self._waiting:
            admitted, size_bytes, *_ = self._waiting[0]
            if not admitted.cancelled():
                if self.held_bytes + size_bytes > self.size_bytes:
                    return
                self.held_bytes += size_bytes
                admitted.set_result(None)
            self._waiting.popleft()
