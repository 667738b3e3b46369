"""One request's reading of its media in worker processes, for a thread that plans it: both end when the request leaves.

What is read is `jobs`' business, by whom `pool`'s.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from common.contract.errors import Unavailable
from services.preprocessing.sources.source import Source
from services.preprocessing.video.packets import PacketIndex
from services.preprocessing.video.pictures import Picture
from services.preprocessing.workers.jobs import IndexPicture, IndexVideo, Job
from services.preprocessing.workers.pool import Pool

T = TypeVar("T")


class Reading:
    """Made and left in the event loop's thread, which is the pool's; asked in another, which stands still meanwhile."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._running: asyncio.Task[object] | None = None
        self._left = False

    def packets(self, source: Source) -> PacketIndex:
        """As `read_packets`. Raises Unavailable once the request has left."""
        return self._wait(IndexVideo(source))

    def picture(self, source: Source) -> Picture:
        """As `read_picture`. Raises Unavailable once the request has left."""
        return self._wait(IndexPicture(source))

    def check_wanted(self) -> None:
        """Raises Unavailable once the request has left."""
        if self._left:
            raise _left()

    def leave(self) -> None:
        """Ends what is being read, and whatever is still to be."""
        self._left = True
        if self._running is not None:
            self._running.cancel()

    def _wait(self, job: Job[T]) -> T:
        return asyncio.run_coroutine_threadsafe(self._call(job), self._loop).result()

    async def _call(self, job: Job[T]) -> T:
        # Not cancelled from the other thread: that would go on, and close the file, before the worker has been told.
        self._running = asyncio.current_task()
        try:
            if self._left:
                raise asyncio.CancelledError
            return await self._pool.call(job)
        except asyncio.CancelledError as error:
            raise _left() from error


def _left() -> Unavailable:
    return Unavailable("the request has left", "preprocessing")
