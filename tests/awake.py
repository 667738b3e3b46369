"""A clock for time limits on busy machines: it nearly stops while the whole machine stalls."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

# Time in which failures arrive and cancelled calls release what they hold. CI machines may be busy with other work.
SOON_S = 3.0 if "CI" in os.environ else 1.0
_TICK_S = 0.02
_MOST_S = 0.1


@contextmanager
def awake() -> Iterator[Callable[[], float]]:
    """Yields a function: seconds since the start, in which a stall of the machine counts as 0.1 s at most."""
    passed_s, left = 0.0, threading.Event()

    def tick() -> None:
        nonlocal passed_s
        seen_s = time.monotonic()
        while not left.wait(_TICK_S):
            now_s = time.monotonic()
            passed_s += min(now_s - seen_s, _MOST_S)
            seen_s = now_s

    ticking = threading.Thread(target=tick, name="awake", daemon=True)
    ticking.start()
    try:
        yield lambda: passed_s
    finally:
        left.set()
        ticking.join()


async def within(within_s: float, awaited: Awaitable[T]) -> T:
    """`asyncio.wait_for` by that clock."""
    task = asyncio.ensure_future(awaited)
    with awake() as passed_s:
        while not task.done():
            if passed_s() > within_s:
                task.cancel()
                await asyncio.wait([task])
                raise TimeoutError(f"it took longer than {within_s:g} s")
            await asyncio.wait([task], timeout=_TICK_S)
    return await task
