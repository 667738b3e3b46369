"""A clock for bounds of time that hold on any machine, however busy: it stands still while the machine does."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

# Within which failures are heard and what leavers held is given up; CI's machines may be busy with others' work.
SOON_S = 3.0 if "CI" in os.environ else 1.0
_TICK_S = 0.02
_MOST_S = 0.1


@contextmanager
def awake() -> Iterator[Callable[[], float]]:
    """Inside, tells the seconds since it was entered, of which a stall of the whole machine takes a tenth at most."""
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
    """As `asyncio.wait_for`, by that clock."""
    task = asyncio.ensure_future(awaited)
    with awake() as passed_s:
        while not task.done():
            if passed_s() > within_s:
                task.cancel()
                await asyncio.wait([task])
                raise TimeoutError(f"it took longer than {within_s:g} s")
            await asyncio.wait([task], timeout=_TICK_S)
    return await task
