"""Who is given a worker, and how far it runs ahead: pieces in order, shared evenly, with nothing left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from time import monotonic_ns

import pytest

from common.contract.errors import MediaRejected, StartupError
from services.preprocessing.workers.job_queue import JobQueue, started
from services.preprocessing.workers.process import Fault, WorkerProcess
from tests.preprocessing.pool_asks import (
    LIMITS,
    MIB,
    children,
    counting,
    open_descriptors,
    open_memories,
    pieces_made,
    until,
)

pytest_plugins = ["tests.preprocessing.fixtures"]
pytestmark = pytest.mark.usefixtures("nothing_is_left", "no_stop_is_late")


async def test_pieces_come_in_order_with_what_they_hold(pool_of: Callable[..., JobQueue]) -> None:
    async with pool_of() as pool, pool.stream(counting(20)) as pieces:
        assert pieces_made([each async for each in pieces]) == list(range(20))


async def test_time_is_counted_while_the_worker_works_and_not_while_the_reader_does(
    pool_of: Callable[..., JobQueue],
) -> None:
    limits = replace(LIMITS, wall_s=1.5)
    async with pool_of(inflight_bytes=MIB, limits=limits) as pool:
        async with pool.stream(counting(5, piece_s=0.02)) as pieces:
            read = []
            async for each in pieces:
                read.append(each)
                await asyncio.sleep(0.4)
        assert pieces_made(read) == list(range(5))
        async with pool.stream(counting(50, piece_s=0.05)) as pieces:
            with pytest.raises(MediaRejected, match=r"more than 1\.5 s"):
                _ = [each async for each in pieces]


@pytest.mark.parametrize("inflight", [1, 3, 10])
async def test_a_worker_runs_ahead_of_its_reader_by_the_bytes_in_flight(
    pool_of: Callable[..., JobQueue], inflight: int
) -> None:
    async with pool_of(inflight_bytes=inflight * MIB) as pool:
        before = open_memories()
        async with pool.stream(counting(100)) as pieces:
            first = await anext(pieces)
            await holds(before + inflight)
            second = await anext(pieces)
            assert pieces_made([first, second]) == [0, 1]
            del first, second
            await holds(before + inflight)


async def holds(memories: int) -> None:
    """Returns once so many are open here, one for each piece that is made and not read, and no more come."""
    await until(lambda: open_memories() == memories)
    await asyncio.sleep(0.3)
    assert open_memories() == memories


async def test_jobs_share_the_bytes_in_flight_evenly(pool_of: Callable[..., JobQueue]) -> None:
    async with pool_of(2, inflight_bytes=8 * MIB) as pool:
        before = open_memories()
        async with pool.stream(counting(100, piece_s=0.2)) as greedy:
            facts, _ = await anext(greedy)
            worker = facts.integer("worker", 1, 2**31)
            await until(lambda: open_memories() == before + 8)
            async with pool.stream(counting(100)) as late:
                # The first job holds everything, and yet the second has its piece.
                assert pieces_made([await anext(late)]) == [0]
                for _ in range(6):
                    await anext(greedy)
                await holds(before + 8)
                os.kill(worker, signal.SIGSTOP)  # the first makes nothing more
            await until(lambda: open_memories() <= before + 4)  # what the second held is gone
            assert open_memories() == before + 4
            os.kill(worker, signal.SIGCONT)


async def test_a_slow_reader_gives_its_worker_to_those_who_wait_and_goes_on_where_it_stood(
    pool_of: Callable[..., JobQueue], replaced: list[Fault]
) -> None:
    async with pool_of(inflight_bytes=2 * MIB) as pool, pool.stream(counting(12)) as slow:
        read = [await anext(slow)]
        async with asyncio.timeout(20):
            async with pool.stream(counting(30)) as quick:
                assert pieces_made([each async for each in quick]) == list(range(30))
        read += [each async for each in slow]
        assert pieces_made(read) == list(range(12))
        assert replaced == []


async def test_many_jobs_on_few_workers_all_end(pool_of: Callable[..., JobQueue], replaced: list[Fault]) -> None:
    async with pool_of(2, inflight_bytes=6 * MIB) as pool:

        async def read(pause_s: float) -> list[int]:
            numbers = []
            async with pool.stream(counting(15)) as pieces:
                async for facts, _ in pieces:
                    numbers.append(facts.integer("number", 0, 100))
                    await asyncio.sleep(pause_s)
            return numbers

        async with asyncio.timeout(60):
            found = await asyncio.gather(*(read(0.02 * (each % 3)) for each in range(12)))
        assert found == [list(range(15))] * 12
        assert replaced == []


async def test_a_reader_that_leaves_frees_its_worker_at_the_next_piece(
    pool_of: Callable[..., JobQueue], replaced: list[Fault]
) -> None:
    async with pool_of() as pool:
        descriptors = open_descriptors()
        (worker,) = children()
        async with pool.stream(counting(1000, piece_s=0.05)) as pieces:
            await anext(pieces)
        assert pieces_made([await pool.call(counting(1))]) == [0]
        assert children() == {worker}
        assert open_descriptors() == descriptors


async def test_readers_cancelled_at_any_moment_leak_nothing(pool_of: Callable[..., JobQueue]) -> None:
    async with pool_of(2, inflight_bytes=4 * MIB) as pool:
        descriptors, processes = open_descriptors(), children()

        async def read() -> None:
            async with pool.stream(counting(50, piece_s=0.002)) as pieces:
                async for _ in pieces:
                    await asyncio.sleep(0.001)

        for attempt in range(60):
            reader = asyncio.create_task(read())
            await asyncio.sleep(attempt * 0.001)
            reader.cancel()
            await asyncio.wait([reader])
            assert reader.cancelled()
            del reader
        async with AsyncExitStack() as stack:  # both workers are free again, and so are all the bytes
            for _ in range(2):
                pieces = await stack.enter_async_context(pool.stream(counting(1)))
                await anext(pieces)
            assert children() == processes
            del pieces
        assert open_descriptors() == descriptors


async def test_pools_start_side_by_side_and_stop_together(
    pool_of: Callable[..., JobQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: WorkerProcess) -> None:
        await asyncio.Event().wait()

    async def start() -> None:
        async with started(pool_of(), pool_of()):
            pass

    monkeypatch.setattr(WorkerProcess, "ready", never)
    before = len(children())
    starting = asyncio.create_task(start())
    await until(lambda: len(children()) == before + 2)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()


async def test_a_pool_that_does_not_start_takes_the_others_along(pool_of: Callable[..., JobQueue]) -> None:
    with pytest.raises(StartupError, match="ended with status 1"):
        async with started(pool_of(), JobQueue(1, LIMITS, MIB, lambda _: None, "no.such.module")):
            pass


async def test_jobs_that_wait_for_a_worker_are_told_and_since_when_the_first_of_them(
    pool_of: Callable[..., JobQueue],
) -> None:
    async with pool_of(size=1) as pool, AsyncExitStack() as reading:
        assert (pool.jobs, pool.workers.busy, pool.workers.waiting, pool.workers.oldest_ns) == (0, 0, 0, None)
        first = await reading.enter_async_context(pool.stream(counting(100, piece_s=0.1)))
        await anext(first)
        assert (pool.jobs, pool.workers.busy, pool.workers.waiting, pool.workers.oldest_ns) == (1, 1, 0, None)
        before_ns = monotonic_ns()
        async with pool.stream(counting(1)), pool.stream(counting(1)):
            await until(lambda: pool.workers.waiting == 2)
            assert (pool.jobs, pool.workers.busy) == (3, 1)
            assert pool.workers.oldest_ns is not None
            assert before_ns < pool.workers.oldest_ns < monotonic_ns()
        await until(lambda: pool.workers.waiting == 0)
        assert (pool.jobs, pool.workers.busy, pool.workers.oldest_ns) == (1, 1, None)
    await until(lambda: pool.workers.busy == 0)
