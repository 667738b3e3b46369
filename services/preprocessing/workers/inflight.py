"""How far decoding may run ahead of readers: a budget of bytes that jobs share evenly.

    budget     [job A: made, not read ....][job B ....][free ...]      a third each while there are three jobs
    a job that holds nothing may always make one piece, so that none waits for another's reader

It knows nothing of what a piece is, and belongs to one event loop.
"""

from __future__ import annotations

import asyncio

# Each piece holds a descriptor and a mapping as long as it is unread, however small it is.
_LEAST_PIECE_BYTES = 2**20


class InFlight:
    """The budget. At most `size_bytes`, and one piece a job beyond it."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.held_bytes = 0
        self.shares = 0
        self._changed = asyncio.Event()

    def share(self, piece_bytes: int) -> Share:
        """A new job's share, till it is closed."""
        self.shares += 1
        return Share(self, max(piece_bytes, _LEAST_PIECE_BYTES))

    async def changed(self) -> None:
        """Returns when something was given back, or `wake` was called."""
        await self._changed.wait()

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Share:
    """What one job holds."""

    def __init__(self, budget: InFlight, piece_bytes: int) -> None:
        self._budget = budget
        self._piece_bytes = piece_bytes
        self._held_bytes = 0

    def try_take(self) -> bool:
        """Takes room for a piece if there is any."""
        budget = self._budget
        mine, everyones = self._held_bytes + self._piece_bytes, budget.held_bytes + self._piece_bytes
        if self._held_bytes and (mine > budget.size_bytes // budget.shares or everyones > budget.size_bytes):
            return False
        self._held_bytes = mine
        budget.held_bytes = everyones
        return True

    async def take(self) -> None:
        """Waits for room for a piece, and takes it."""
        while not self.try_take():
            await self._budget.changed()

    def give(self) -> None:
        """Gives the room of one piece back."""
        self._held_bytes -= self._piece_bytes
        assert self._held_bytes >= 0, "given twice"
        self._budget.held_bytes -= self._piece_bytes
        self._budget.wake()

    def close(self) -> None:
        """Gives everything back."""
        self._budget.held_bytes -= self._held_bytes
        self._held_bytes = 0
        self._budget.shares -= 1
        self._budget.wake()
