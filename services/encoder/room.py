"""Bytes that requests reserve before they ask for anything: first come, first served, however large.

It knows nothing of what the bytes are for. It belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque


class Room:
    """A budget of bytes. Whoever waits is never overtaken, so a large reservation cannot starve.

    budget:  [reserved ........][free ....]
    waiting: [6][1][2]                       1 and 2 would fit, and still wait behind 6
    """

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.free_bytes = size_bytes
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @property
    def reserved_bytes(self) -> int:
        return self.size_bytes - self.free_bytes

    async def reserve(self, size_bytes: int) -> None:
        """Returns once the bytes are the caller's, until `release`. A caller that is cancelled holds nothing."""
        assert size_bytes <= self.size_bytes, "would wait for ever"
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiter = (admitted, size_bytes)
        self._waiting.append(waiter)
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.cancelled():
                self._forget(waiter)
            else:
                self.release(size_bytes)
            raise

    def release(self, size_bytes: int) -> None:
        self.free_bytes += size_bytes
        assert self.free_bytes <= self.size_bytes, "released twice"
        self._admit()

    def _forget(self, waiter: tuple[asyncio.Future[None], int]) -> None:
        if waiter in self._waiting:
            self._waiting.remove(waiter)
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][1] <= self.free_bytes:
            admitted, size_bytes = self._waiting.popleft()
            if not admitted.cancelled():
                self.free_bytes -= size_bytes
                admitted.set_result(None)
