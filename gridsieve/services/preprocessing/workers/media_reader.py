"""Reads one request's media in worker processes, for the thread that plans the request; cancelled with the request.

What was read is kept by the digest of the media, so a later request reads none of it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeAlias, TypeVar, cast

from gridsieve.common.contract.errors import Unavailable
from gridsieve.services.preprocessing.sound.track import SoundIndex
from gridsieve.services.preprocessing.sources.last_used import LastUsed
from gridsieve.services.preprocessing.sources.source import Source
from gridsieve.services.preprocessing.video.packets import PacketIndex
from gridsieve.services.preprocessing.video.pictures import PictureIndex
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.jobs import FindShots, IndexPictures, IndexSound, IndexVideo, Job

T = TypeVar("T", PacketIndex, PictureIndex, tuple[int, ...], tuple[SoundIndex, ...])

# Of shots the first frames; of sound the one index, or none.
Index: TypeAlias = PacketIndex | PictureIndex | tuple[int, ...] | tuple[SoundIndex, ...]
# By what was read, and the digest of the media.
Indexes: TypeAlias = LastUsed[tuple[str, bytes], Index]
_MAX_INDEX_BYTES = 2**26


def indexes(on_get: Callable[[bool], None] = lambda _: None) -> Indexes:
    """An empty cache of what was read."""
    return LastUsed(_MAX_INDEX_BYTES, _size_of, on_get)


def _size_of(index: Index) -> int:
    """Bytes of memory, roughly."""
    if isinstance(index, tuple):
        return 512 + 40 * len(index)
    if isinstance(index, PictureIndex):
        return 512 + 64 * len(index.ends)
    numbers = len(index.keyframes) + sum(len(each) for each in (index.times.ticks, index.pts or ()))
    return 1024 + 8 * numbers + 4 * len(index.sizes or ()) + 128 * len(index.epochs)


class MediaReader:
    """Runs indexing jobs for a planning thread, which blocks meanwhile.

    The event loop's thread creates and cancels it; the planning thread calls the other methods.
    """

    def __init__(self, pool: JobQueue, decoding: JobQueue, known: Indexes) -> None:
        """pool: reads headers and packets. decoding: decodes keyframes. known: what earlier requests read."""
        self._pool = pool
        self._decoding = decoding
        self._known = known
        self._loop = asyncio.get_running_loop()
        self._running: asyncio.Task[object] | None = None
        self._cancelled = False

    def packets(self, source: Source) -> PacketIndex:
        """As `read_packets`. Raises Unavailable once the request is cancelled."""
        return self._read(IndexVideo(source), self._pool)

    def shots(self, source: Source, index: PacketIndex, begin: int, end: int) -> tuple[int, ...]:
        """As `find_shots`. Raises Unavailable once the request is cancelled."""
        return self._read(FindShots(source, index, begin, end), self._decoding, f" {begin} {end}")

    def pictures(self, source: Source, ends: tuple[int, ...]) -> PictureIndex:
        """As `read_pictures`; the source's digest must depend on `ends`. Raises Unavailable once cancelled."""
        return self._read(IndexPictures(source, ends), self._pool)

    def sound(self, source: Source) -> SoundIndex | None:
        """As `read_sound`. Raises Unavailable once the request is cancelled."""
        return next(iter(self._read(IndexSound(source), self._pool)), None)

    def check_cancelled(self) -> None:
        """Raises Unavailable once the request is cancelled."""
        if self._cancelled:
            raise _cancelled()

    def cancel(self) -> None:
        """Cancels the job that runs, and all later ones."""
        self._cancelled = True
        if self._running is not None:
            self._running.cancel()

    def _read(self, job: Job[T], queue: JobQueue, part: str = "") -> T:
        """part: of the media, where only that is read."""
        self.check_cancelled()
        key = f"{type(job).__name__}{part}", job.source.digest
        found = cast("T | None", self._known.get(key))
        if found is None:
            found = asyncio.run_coroutine_threadsafe(self._call(job, queue), self._loop).result()
            self._known.put(key, found)
        return found

    async def _call(self, job: Job[T], queue: JobQueue) -> T:
        # The planning thread is not interrupted itself: it would close the file before the worker has been stopped.
        self._running = asyncio.current_task()
        try:
            if self._cancelled:
                raise asyncio.CancelledError
            return await queue.call(job)
        except asyncio.CancelledError as error:
            raise _cancelled() from error


def _cancelled() -> Unavailable:
    return Unavailable("the request was cancelled", "preprocessing")
