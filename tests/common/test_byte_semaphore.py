"""Room: first come, first served, never more than there is, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from time import monotonic_ns

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.byte_semaphore import ByteSemaphore


async def hold(room: ByteSemaphore, size_bytes: int, turns: int, order: list[int], name: int) -> None:
    async with room.reserved(size_bytes):
        order.append(name)
        for _ in range(turns):
            assert room.held_bytes <= room.size_bytes
            await asyncio.sleep(0)


requests = st.lists(st.tuples(st.integers(1, 10), st.integers(0, 5), st.booleans()), max_size=20)


@given(requests=requests)
def test_everyone_is_served_in_order_within_the_budget_whoever_gives_up(
    requests: list[tuple[int, int, bool]],
) -> None:
    async def run() -> None:
        room, order = ByteSemaphore(10), list[int]()
        tasks = []
        async with room.reserved(10):  # all of them queue
            for name, (size_bytes, turns, _) in enumerate(requests):
                tasks.append(asyncio.create_task(hold(room, size_bytes, turns, order, name)))
                await asyncio.sleep(0)
        for task, (_, _, gives_up) in zip(tasks, requests, strict=True):
            if gives_up:
                task.cancel()
                await asyncio.sleep(0)
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results)
        assert order == sorted(order)
        stayed = {name for name, (_, _, gives_up) in enumerate(requests) if not gives_up}
        assert stayed <= set(order)
        assert room.held_bytes == 0

    asyncio.run(run())


async def test_a_large_request_is_not_overtaken_by_small_ones_that_would_fit() -> None:
    room, order = ByteSemaphore(10), list[int]()
    async with room.reserved(5):
        large = asyncio.create_task(hold(room, 6, 1, order, 0))
        await asyncio.sleep(0)
        small = asyncio.create_task(hold(room, 1, 1, order, 1))
        await asyncio.sleep(0.01)
        assert order == []
    await asyncio.gather(large, small)
    assert order == [0, 1]


async def test_nothing_at_all_is_had_at_once_however_many_wait() -> None:
    room = ByteSemaphore(10)
    async with room.reserved(10):
        waiting = asyncio.create_task(hold(room, 1, 0, [], 0))
        await asyncio.sleep(0)
        async with asyncio.timeout(1), room.reserved(0):
            pass
    await waiting


async def test_a_waiter_that_gives_up_in_the_turn_in_which_room_is_freed_leaves_it_to_the_next() -> None:
    room, order = ByteSemaphore(10), list[int]()
    async with room.reserved(10):
        leaving = asyncio.create_task(hold(room, 10, 0, order, 0))
        next_one = asyncio.create_task(hold(room, 10, 0, order, 1))
        await asyncio.sleep(0)
        leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    await asyncio.wait_for(next_one, 1)
    assert (order, room.held_bytes) == ([1], 0)


async def test_a_waiter_that_was_admitted_and_cancelled_at_once_gives_its_room_back() -> None:
    room = ByteSemaphore(10)
    async with room.reserved(10):
        waiting = asyncio.create_task(hold(room, 4, 0, [], 0))
        await asyncio.sleep(0)
    assert room.held_bytes == 4
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert room.held_bytes == 0


async def test_those_who_wait_are_told_and_since_when_the_first_of_them() -> None:
    room = ByteSemaphore(10)
    assert (room.waiting, room.oldest_ns) == (0, None)
    async with room.reserved(10):
        before_ns = monotonic_ns()
        first = asyncio.create_task(hold(room, 4, 0, [], 0))
        await asyncio.sleep(0)
        between_ns = monotonic_ns()
        second = asyncio.create_task(hold(room, 4, 0, [], 1))
        await asyncio.sleep(0)
        assert room.waiting == 2
        assert room.oldest_ns is not None
        assert before_ns <= room.oldest_ns <= between_ns
        gives_up = asyncio.create_task(hold(room, 4, 0, [], 2))
        await asyncio.sleep(0)
        gives_up.cancel()
        await asyncio.wait([gives_up])
        assert room.waiting == 2
        first.cancel()
        await asyncio.wait([first])
        assert room.waiting == 1
        assert room.oldest_ns > between_ns
    await second
    assert (room.waiting, room.oldest_ns) == (0, None)
