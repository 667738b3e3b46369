"""The threads that plan: they check, hash, tokenise and lay out beside the event loop. Media are decoded elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import Self, TypeVar

T = TypeVar("T")


class Threads:
    """A bounded number of threads. An async context manager: leaving waits for what runs, and nothing more starts."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="planning")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Not on the event loop: what runs may wait for it.
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)

    async def call(self, function: Callable[[], T]) -> T:
        """Runs it on a thread, for the caller's request. If the caller is cancelled it runs on, and nobody sees what it
        returns.
        """
        return await asyncio.get_running_loop().run_in_executor(self._threads, copy_context().run, function)
