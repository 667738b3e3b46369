"""The byte semaphore: FIFO, never above its size, and no waiter is forgotten."""

from __future__ import annotations

import asyncio
from time import monotonic_ns

from hypothesis import given
from hypothesis import strategies as st

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.yielding import begin_call


async def hold(semaphore: ByteSemaphore, size_bytes: int, turns: int, order: list[int], name: int) -> None:
    async with semaphore.reserved(size_bytes):
        order.append(name)
        for _ in range(turns):
            assert semaphore.held_bytes <= semaphore.size_bytes
            await asyncio.sleep(0)


@given(requests=st.lists(st.tuples(st.integers(1, 10), st.integers(0, 5), st.booleans()), max_size=20))
def test_reservations_are_admitted_in_order_whichever_are_cancelled(requests: list[tuple[int, int, bool]]) -> None:
    async def run() -> None:
        semaphore, order = ByteSemaphore(10), list[int]()
        tasks = []
        async with semaphore.reserved(10):  # so that all of them queue
            for name, (size_bytes, turns, _) in enumerate(requests):
                tasks.append(asyncio.create_task(hold(semaphore, size_bytes, turns, order, name)))
                await asyncio.sleep(0)
        for task, (_, _, is_cancelled) in zip(tasks, requests, strict=True):
            if is_cancelled:
                task.cancel()
                await asyncio.sleep(0)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert order == sorted(order)
        stayed = {name for name, (_, _, is_cancelled) in enumerate(requests) if not is_cancelled}
        assert stayed <= set(order)
        assert semaphore.held_bytes == 0

    asyncio.run(run())


async def test_calls_that_yield_wait_behind_others() -> None:
    semaphore, order = ByteSemaphore(1), list[int]()

    async def call(name: int, yields: bool) -> None:
        begin_call(yields)
        await asyncio.create_task(hold(semaphore, 1, 0, order, name))

    calls = []
    async with semaphore.reserved(1):
        for name, yields in enumerate((True, True, False, True, False)):
            calls.append(asyncio.create_task(call(name, yields)))
            while semaphore.waiting <= name:
                await asyncio.sleep(0)
    await asyncio.gather(*calls)
    assert order == [2, 4, 0, 1, 3]


async def test_a_reservation_of_0_bytes_does_not_wait() -> None:
    semaphore = ByteSemaphore(10)
    async with asyncio.timeout(1), semaphore.reserved(10), semaphore.reserved(0):
        pass


async def test_waiting_reservations_are_counted_and_the_oldest_is_dated() -> None:
    semaphore = ByteSemaphore(10)
    async with semaphore.reserved(5):
        before_ns = monotonic_ns()
        first = asyncio.create_task(hold(semaphore, 6, 0, [], 0))
        await asyncio.sleep(0)
        between_ns = monotonic_ns()
        second = asyncio.create_task(hold(semaphore, 1, 0, [], 1))  # it would fit, and waits behind the first
        leaving = asyncio.create_task(hold(semaphore, 1, 0, [], 2))
        await asyncio.sleep(0)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert semaphore.waiting == 2
        assert semaphore.oldest_ns is not None
        assert before_ns <= semaphore.oldest_ns <= between_ns
        first.cancel()
        await asyncio.wait([first, second])
    assert (semaphore.waiting, semaphore.oldest_ns) == (0, None)
