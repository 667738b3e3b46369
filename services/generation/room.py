"""The bytes that media embeddings may take, for all requests together.

A request reserves room for all of its media at once and holds it to its end, so nobody holds room while waiting for
more: requests cannot deadlock. First come, first served: one that needs much is not overtaken for ever.

    room:     [held ........][free ...]
    waiting:  [6][1][2]                  1 and 2 would fit, and still wait behind 6

It knows nothing of media, and belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Room:
    """A budget of `size_bytes`."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()

    @asynccontextmanager
    async def reserved(self, size_bytes: int) -> AsyncIterator[None]:
        """Waits until the bytes are free, and holds them inside. Nothing at all is free at once."""
        assert size_bytes <= self.size_bytes, f"{size_bytes} of {self.size_bytes} bytes would be waited for for ever"
        if size_bytes:
            await self._reserve(size_bytes)
        try:
            yield
        finally:
            self.held_bytes -= size_bytes
            self._admit()

    async def _reserve(self, size_bytes: int) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((admitted, size_bytes))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # admitted and cancelled in the same turn of the loop
                self.held_bytes -= size_bytes
            self._admit()
            raise

    def _admit(self) -> None:
        while self._waiting:
            admitted, size_bytes = self._waiting[0]
            if not admitted.cancelled():
                if self.held_bytes + size_bytes > self.size_bytes:
                    return
                self.held_bytes += size_bytes
                admitted.set_result(None)
            self._waiting.popleft()
