"""Planning threads run a bounded number of functions at once, and end without deadlock."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.preprocessing.rpc.planning_threads import PlanningThreads


async def test_results_and_errors_reach_the_caller_from_at_most_so_many_threads() -> None:
    async with PlanningThreads(2) as threads:
        with pytest.raises(ZeroDivisionError):
            await threads.call(lambda: 1 // 0)
        both = threading.Barrier(2)
        async with asyncio.timeout(5):
            await asyncio.gather(*(threads.call(both.wait) for _ in range(2)))
        used = await asyncio.gather(*(threads.call(threading.current_thread) for _ in range(20)))
        assert threading.current_thread() not in used
        assert len(set(used)) <= 2


async def test_ending_lets_a_running_function_use_the_event_loop() -> None:
    loop = asyncio.get_running_loop()
    started = threading.Event()

    def ask() -> int:
        started.set()
        return asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1, 42), loop).result(5)

    async with PlanningThreads(1) as threads:
        asked = asyncio.create_task(threads.call(ask))
        await asyncio.to_thread(started.wait, 5)
    assert await asked == 42
