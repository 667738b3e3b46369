"""A bounded queue between the task that makes a call's responses and the gRPC writer, which waits for the caller.

A slow caller holds back the task (backpressure). A caller that reads nothing for long, while others wait for the room
that its call holds, is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Generic, TypeVar

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract.errors import Overloaded

T = TypeVar("T")
R = TypeVar("R")

# Messages queued for a slow caller, at most 1 MiB each.
QUEUED = 2
_UNREAD_S = 30.0


class ResponseQueue(Generic[T]):
    """Responses to be sent, in order. None in the queue only wakes the writer."""

    def __init__(self, room: ByteSemaphore | None) -> None:
        """room: of which this call holds bytes until its responses are read; None: it holds none."""
        self._room = room
        self._queue: asyncio.Queue[T | None] = asyncio.Queue(QUEUED)

    @property
    def full(self) -> bool:
        return self._queue.full()

    async def put(self, response: T) -> None:
        """Raises Overloaded as `read` does."""
        await self.read(partial(self._queue.put, response))

    def put_nowait(self, response: T) -> None:
        self._queue.put_nowait(response)

    async def read(self, wait: Callable[[], Awaitable[R]]) -> R:
        """Waits for something that depends on the caller's reading; `wait` is called again after 30 s.

        Raises Overloaded if the caller reads nothing while others wait for room.
        """
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_UNREAD_S):
                    return await wait()
            if self._room and self._room.waiting:
                raise Overloaded(
                    f"the caller has read nothing for {_UNREAD_S:g} s, and others wait for the room it holds"
                )

    async def until_done(self, task: asyncio.Task[None]) -> AsyncGenerator[T, None]:
        """Yields everything that is put until `task` is done, then raises the error of the task, if any.

        Closing the iterator cancels the task and waits for its end.
        """
        task.add_done_callback(self._wake)
        try:
            while not (task.done() and self._queue.empty()):
                response = await self._queue.get()
                if response is not None:
                    yield response
            task.result()
        finally:
            task.cancel()
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # marks it as retrieved: the caller has it already, or has disconnected

    def _wake(self, _: asyncio.Task[None]) -> None:
        if self._queue.empty():
            self._queue.put_nowait(None)
