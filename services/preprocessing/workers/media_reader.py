"""Reads one request's media in worker processes, for the thread that plans the request; cancelled with the request."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from common.contract.errors import Unavailable
from services.preprocessing.sources.source import Source
from services.preprocessing.video.packets import PacketIndex
from services.preprocessing.video.pictures import Picture
from services.preprocessing.workers.job_queue import JobQueue
from services.preprocessing.workers.jobs import IndexPicture, IndexVideo, Job

T = TypeVar("T")


class MediaReader:
    """Runs indexing jobs for a planning thread, which blocks meanwhile.

    The event loop's thread creates and cancels it; the planning thread calls the other methods.
    """

    def __init__(self, pool: JobQueue) -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._running: asyncio.Task[object] | None = None
        self._cancelled = False

    def packets(self, source: Source) -> PacketIndex:
        """As `read_packets`. Raises Unavailable once the request is cancelled."""
        return self._wait(IndexVideo(source))

    def picture(self, source: Source) -> Picture:
        """As `read_picture`. Raises Unavailable once the request is cancelled."""
        return self._wait(IndexPicture(source))

    def check_cancelled(self) -> None:
        """Raises Unavailable once the request is cancelled."""
        if self._cancelled:
            raise _cancelled()

    def cancel(self) -> None:
        """Cancels the job that runs, and all later ones."""
        self._cancelled = True
        if self._running is not None:
            self._running.cancel()

    def _wait(self, job: Job[T]) -> T:
        return asyncio.run_coroutine_threadsafe(self._call(job), self._loop).result()

    async def _call(self, job: Job[T]) -> T:
        # The planning thread is not interrupted itself: it would close the file before the worker has been stopped.
        self._running = asyncio.current_task()
        try:
            if self._cancelled:
                raise asyncio.CancelledError
            return await self._pool.call(job)
        except asyncio.CancelledError as error:
            raise _cancelled() from error


def _cancelled() -> Unavailable:
    return Unavailable("the request was cancelled", "preprocessing")
