"""The threads that plan: they check, hash, tokenise and lay out beside the event loop. Media are decoded elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from time import monotonic_ns
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")


class Threads:
    """A bounded number of threads. An async context manager: leaving waits for what runs, and nothing more starts."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="planning")
        self._jobs: set[object] = set()
        self._waiting: dict[object, int] = {}  # since when, the first first

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not on the event loop: what runs may wait for it.
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    @property
    def jobs(self) -> int:
        """How many functions run, or wait for a thread, whether anybody waits for them or not."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """How many of these wait."""
        return len(self._waiting)

    @property
    def oldest_ns(self) -> int | None:
        """Since when the first of them has waited, on the monotonic clock; from any thread."""
        return next(iter(list(self._waiting.values())), None)

    async def call(self, function: Callable[[], T]) -> T:
        """Runs it on a thread, for the caller's request.

        If the caller is cancelled, one that has begun runs on, and nobody sees what it returns; one that still waits
        for a thread never runs.
        """
        place = object()
        self._jobs.add(place)
        self._waiting[place] = monotonic_ns()
        try:
            job = self._threads.submit(self._run, place, copy_context(), function)
        except BaseException:
            self._forget(place)
            raise
        job.add_done_callback(lambda _: self._forget(place))
        return await asyncio.wrap_future(job)

    def _run(self, place: object, context: Context, function: Callable[[], T]) -> T:
        del self._waiting[place]
        return context.run(function)

    def _forget(self, place: object) -> None:
        self._waiting.pop(place, None)
        self._jobs.discard(place)
