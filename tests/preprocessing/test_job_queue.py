"""Jobs get workers in turn, run ahead of their readers within the in-flight budget, and leave nothing behind."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from time import monotonic_ns

import pytest

from gridsieve.common.contract.errors import MediaRejected, StartupError, Unavailable
from gridsieve.common.yielding import begin_call
from gridsieve.services.preprocessing.rpc.planning_threads import PlanningThreads
from gridsieve.services.preprocessing.workers.job_queue import InFlightBudget, JobQueue, Share
from gridsieve.services.preprocessing.workers.media_reader import MediaReader, indexes
from gridsieve.services.preprocessing.workers.process import Fault
from tests.preprocessing.worker_jobs import (
    ENTRY,
    LIMITS,
    MIB,
    SOURCE,
    Ask,
    counting,
    open_memories,
    pieces_made,
    read,
    until,
)
from tests.processes import children

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_time_counts_while_the_worker_works_and_not_while_its_reader_does(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch, replaced: list[Fault]
) -> None:
    queue.inflight.size_bytes = MIB
    monkeypatch.setattr(queue, "_limits", replace(LIMITS, stall_s=0.8, frame_s=0.1))
    async with queue.stream(counting(5, piece_s=0.01, frames=0)) as pieces:
        async for each in pieces:
            assert each
            await asyncio.sleep(0.2)
    assert replaced == []


async def test_a_worker_may_work_as_long_as_its_frames_allow_while_it_makes_progress(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch, replaced: list[Fault]
) -> None:
    monkeypatch.setattr(queue, "_limits", replace(LIMITS, stall_s=0.8, frame_s=0.1))
    await read(queue, counting(1, piece_s=1.5, progress=True, frames=50))
    with pytest.raises(MediaRejected, match=r"^video cannot be decoded: it made no progress for 0\.8 s$"):
        await read(queue, counting(1, piece_s=1.5, frames=50))
    with pytest.raises(MediaRejected, match=r"^video cannot be decoded: 2 frames of it took more than 1 s$"):
        await read(queue, counting(2, piece_s=0.7, progress=True, frames=2))
    assert replaced == [Fault.SLOW] * 2
    replaced.clear()


async def test_a_worker_runs_ahead_of_its_reader_by_the_bytes_in_flight(queue: JobQueue) -> None:
    queue.inflight.size_bytes = 3 * MIB
    before = open_memories()

    async def unread_pieces_stay_at_the_limit() -> None:
        await until(lambda: open_memories() == before + 3)
        await asyncio.sleep(0.1)
        assert open_memories() == before + 3

    async with queue.stream(counting(100)) as pieces:
        assert pieces_made([await anext(pieces)]) == [0]
        await unread_pieces_stay_at_the_limit()
        assert pieces_made([await anext(pieces)]) == [1]
        await unread_pieces_stay_at_the_limit()


async def test_a_slow_reader_lends_its_worker_to_waiting_jobs_and_continues_later(queue: JobQueue) -> None:
    queue.inflight.size_bytes = 2 * MIB
    async with queue.stream(counting(12)) as slow:
        made = [await anext(slow)]
        assert pieces_made(await asyncio.wait_for(read(queue, counting(30)), 20)) == list(range(30))
        made += [each async for each in slow]
    assert pieces_made(made) == list(range(12))


async def test_jobs_of_calls_that_yield_give_their_workers_to_others_and_continue(queue: JobQueue) -> None:
    order: list[str] = []

    async def call(name: str, pieces: int, yields: bool) -> None:
        begin_call(yields)
        assert pieces_made(await read(queue, counting(pieces, piece_s=0.02))) == list(range(pieces))
        order.append(name)

    async with asyncio.TaskGroup() as calls:
        for number in range(queue.workers.size + 2):
            calls.create_task(call(f"job {number}", 20, True))
        await until(lambda: queue.workers.waiting == 2)
        calls.create_task(call("question", 2, False))
    assert order[0] == "question"


async def test_a_reader_that_leaves_frees_its_worker_at_the_next_piece(queue: JobQueue) -> None:
    workers = children()
    async with queue.stream(counting(1000, piece_s=0.05)) as pieces:
        await anext(pieces)
    assert pieces_made([await queue.call(counting(1))]) == [0]
    assert children() == workers


async def test_readers_cancelled_at_any_moment_leak_nothing(queue: JobQueue) -> None:
    attempts = 15
    queue.inflight.size_bytes = 4 * MIB

    async def read_slowly() -> None:
        async with queue.stream(counting(50, piece_s=0.002)) as pieces:
            async for _ in pieces:
                await asyncio.sleep(0.001)

    for attempt in range(attempts):
        reader = asyncio.create_task(read_slowly())
        await asyncio.sleep(attempt * 0.06 / attempts)
        reader.cancel()
        await asyncio.wait([reader])
        assert reader.cancelled()


async def test_gauges_count_running_and_waiting_jobs(queue: JobQueue) -> None:
    workers = queue.workers
    async with queue.stream(counting(100, piece_s=0.05)) as first:
        await anext(first)
        assert (queue.jobs, workers.busy, workers.waiting, workers.oldest_ns) == (1, 1, 0, None)
        before_ns = monotonic_ns()
        async with queue.stream(counting(1)), queue.stream(counting(1)):
            await until(lambda: workers.waiting == 2)
            assert (queue.jobs, workers.busy) == (3, 1)
            assert workers.oldest_ns is not None
            assert before_ns < workers.oldest_ns < monotonic_ns()
        await until(lambda: workers.waiting == 0)
        assert (queue.jobs, workers.busy, workers.oldest_ns) == (1, 1, None)


async def test_the_processor_time_of_a_worker_grows_with_its_work(queue: JobQueue) -> None:
    (worker,) = queue.workers._workers
    before_s = worker.processor_s()
    await read(queue, counting(300))
    assert 0.05 < before_s < worker.processor_s()


async def test_a_queue_whose_workers_do_not_start_stops_them_all() -> None:
    before = children()
    with pytest.raises(StartupError, match="ended with status 1"):
        async with JobQueue(2, LIMITS, MIB, print, "no.such.module"):
            pass
    assert children() == before


async def test_stopping_kills_the_workers_and_fails_all_jobs() -> None:
    before = children()
    async with JobQueue(1, LIMITS, MIB, print, ENTRY) as queue:
        hanging = asyncio.create_task(queue.call(Ask("hang")))
        await until(lambda: queue.workers.busy == 1)
        # The task of this job has not taken its first step when the queue stops.
        unstarted = asyncio.create_task(queue.call(counting(1)))
        await asyncio.sleep(0)
    assert children() == before
    async with asyncio.timeout(5):
        for waiting in (hanging, unstarted, queue.call(counting(1))):
            with pytest.raises(Unavailable, match="stopping"):
                await waiting


async def test_a_cancelled_request_reads_nothing(queue: JobQueue) -> None:
    reader = MediaReader(queue, queue, indexes())
    reader.cancel()
    with pytest.raises(Unavailable, match="was cancelled"):
        await asyncio.to_thread(reader.packets, SOURCE)


def acquired(share: Share) -> int:
    """Acquires room for as many pieces as there is."""
    pieces = 0
    while share.try_acquire():
        pieces += 1
    return pieces


@pytest.mark.parametrize(
    ("budget_mib", "piece_bytes", "pieces"),
    [
        (10, [3 * MIB], [3]),  # one job may hold everything
        (12, [MIB, 3 * MIB], [6, 2]),  # the same bytes for each job
        (1, [5 * MIB] * 3, [1, 1, 1]),  # one piece for each job, however large
        (16, [0], [16]),  # small pieces count as 1 MiB
    ],
)
async def test_jobs_share_the_budget_evenly_and_each_may_make_one_piece(
    budget_mib: int, piece_bytes: list[int], pieces: list[int]
) -> None:
    budget = InFlightBudget(budget_mib * MIB)
    shares = [budget.share(each) for each in piece_bytes]
    assert [acquired(share) for share in shares] == pieces
    assert budget.held_bytes == sum(max(MIB, each) * n for each, n in zip(piece_bytes, pieces, strict=True))


async def test_a_job_with_more_than_its_share_makes_nothing_until_others_have_theirs() -> None:
    budget = InFlightBudget(8 * MIB)
    early = budget.share(MIB)
    for _ in range(7):
        assert early.try_acquire()
    late = budget.share(MIB)
    assert (acquired(late), acquired(early)) == (1, 0)
    early.release()
    assert (acquired(early), acquired(late)) == (0, 1)  # six are still more than half
    waiting = asyncio.create_task(late.acquire())
    await asyncio.sleep(0)
    assert not waiting.done()
    early.close()
    await asyncio.wait_for(waiting, 1)
    late.close()
    assert (budget.held_bytes, budget.shares) == (0, 0)


async def test_planning_threads_end_without_deadlock_while_a_plan_uses_the_event_loop() -> None:
    loop = asyncio.get_running_loop()
    started = threading.Event()

    def ask() -> int:
        started.set()
        return asyncio.run_coroutine_threadsafe(asyncio.sleep(0.1, 42), loop).result(5)

    async with PlanningThreads(1) as threads:
        asked = asyncio.create_task(threads.call(ask))
        await asyncio.to_thread(started.wait, 5)
    assert await asked == 42


async def test_a_function_that_is_cancelled_while_it_waits_for_a_planning_thread_is_forgotten() -> None:
    held = threading.Event()
    async with PlanningThreads(1) as threads:
        running, waiting = (asyncio.create_task(threads.call(lambda: held.wait(5))) for _ in range(2))
        await until(lambda: threads.waiting == 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert (threads.jobs, threads.waiting, threads.oldest_ns) == (1, 0, None)
        held.set()
        await running
