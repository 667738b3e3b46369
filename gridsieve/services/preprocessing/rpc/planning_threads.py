"""Threads that plan prompts outside the event loop: they check, hash, tokenise and lay out, but decode nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context, copy_context
from time import monotonic_ns
from typing import Self, TypeVar

T = TypeVar("T")


class PlanningThreads:
    """A bounded thread pool. Leaving it waits for running functions and starts no more."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="planning")
        self._jobs: set[object] = set()
        self._waiting: dict[object, int] = {}  # monotonic start of each wait, the oldest first

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # Not in the event loop's thread: a running function may wait for the loop.
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    @property
    def jobs(self) -> int:
        """Functions that run or wait for a thread, including those whose caller was cancelled."""
        return len(self._jobs)

    @property
    def waiting(self) -> int:
        """Functions that wait for a thread."""
        return len(self._waiting)

    @property
    def oldest_ns(self) -> int | None:
        """Monotonic time at which the longest waiting function began to wait. May be read from any thread."""
        return next(iter(list(self._waiting.values())), None)

    async def call(self, function: Callable[[], T]) -> T:
        """Runs the function on a thread, with the caller's context variables.

        If the caller is cancelled, a running function continues and its result is dropped; a waiting one never runs.
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
