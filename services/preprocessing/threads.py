"""The threads that decode, and how far they may run ahead of their reader.

A worker makes one slice at a time and is free in between, so a slow reader holds no worker. PyAV and Pillow release
the interpreter lock. It knows nothing of what a slice is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import TypeVar

T = TypeVar("T")

LOOKAHEAD = 2


class Workers:
    """A bounded number of threads."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="worker")

    async def call(self, function: Callable[[], T]) -> T:
        """Runs it on a worker. If the caller is cancelled it runs on, and nobody sees what it returns."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    @asynccontextmanager
    async def ahead(self, steps: Generator[T, None, None]) -> AsyncIterator[AsyncGenerator[T, None]]:
        """What `steps` yields, each step made on a worker, at most LOOKAHEAD of them before they are asked for.

        On leaving, no step runs any more and `steps` is closed.
        """
        room = asyncio.Semaphore(LOOKAHEAD)
        made: asyncio.Queue[T | BaseException | None] = asyncio.Queue()
        task = asyncio.create_task(self._make(steps, room, made))
        try:
            async with aclosing(_taken(room, made)) as taken:
                yield taken
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _make(
        self, steps: Generator[T, None, None], room: asyncio.Semaphore, made: asyncio.Queue[T | BaseException | None]
    ) -> None:
        step: asyncio.Future[T | None] | None = None
        try:
            while True:
                await room.acquire()
                step = asyncio.ensure_future(self.call(lambda: next(steps, None)))
                result = await asyncio.shield(step)
                made.put_nowait(result)
                if result is None:
                    return
        except Exception as error:
            made.put_nowait(error)
        finally:
            if step is not None and not step.done():
                await asyncio.wait([step])  # a thread cannot be stopped; what it reads must stay open till it is done
            await self.call(steps.close)

    def shut_down(self) -> None:
        """Waits for the steps that run and starts no more."""
        self._threads.shutdown(cancel_futures=True)


async def _taken(room: asyncio.Semaphore, made: asyncio.Queue[T | BaseException | None]) -> AsyncGenerator[T, None]:
    while True:
        result = await made.get()
        if result is None:
            return
        if isinstance(result, BaseException):
            raise result
        room.release()
        yield result
