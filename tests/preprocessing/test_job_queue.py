"""Jobs get workers in turn, run ahead of their readers within the in-flight budget, and leave nothing behind."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns

import pytest

from common.contract.errors import MediaRejected, StartupError, Unavailable
from services.preprocessing.sources.source import path_source
from services.preprocessing.workers.job_queue import InFlightBudget, JobQueue, Share, started
from services.preprocessing.workers.media_reader import MediaReader
from services.preprocessing.workers.process import Fault
from tests.preprocessing.preprocessing_media import clip
from tests.preprocessing.worker_jobs import (
    ENTRY,
    LIMITS,
    MIB,
    Ask,
    children,
    counting,
    open_memories,
    pieces_made,
    until,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_time_counts_while_the_worker_works_and_not_while_its_reader_does(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch, replaced: list[Fault]
) -> None:
    monkeypatch.setattr(queue.inflight, "size_bytes", MIB)
    monkeypatch.setattr(queue, "_limits", replace(LIMITS, wall_s=0.8))
    async with queue.stream(counting(5, piece_s=0.01)) as pieces:
        read = []
        async for each in pieces:
            read.append(each)
            await asyncio.sleep(0.2)
    assert pieces_made(read) == list(range(5))
    async with queue.stream(counting(50, piece_s=0.05)) as pieces:
        with pytest.raises(MediaRejected, match=r"^video cannot be decoded: it took more than 0\.8 s$"):
            _ = [each async for each in pieces]
    assert replaced == [Fault.SLOW]


async def test_a_worker_runs_ahead_of_its_reader_by_the_bytes_in_flight(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue.inflight, "size_bytes", 3 * MIB)
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


async def test_a_slow_reader_lends_its_worker_to_waiting_jobs_and_continues_later(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch, replaced: list[Fault]
) -> None:
    monkeypatch.setattr(queue.inflight, "size_bytes", 2 * MIB)
    async with queue.stream(counting(12)) as slow:
        read = [await anext(slow)]
        async with asyncio.timeout(20), queue.stream(counting(30)) as quick:
            assert pieces_made([each async for each in quick]) == list(range(30))
        read += [each async for each in slow]
    assert pieces_made(read) == list(range(12))
    assert replaced == []


async def test_a_reader_that_leaves_frees_its_worker_at_the_next_piece(queue: JobQueue) -> None:
    workers = children()
    async with queue.stream(counting(1000, piece_s=0.05)) as pieces:
        await anext(pieces)
    assert pieces_made([await queue.call(counting(1))]) == [0]
    assert children() == workers


@pytest.mark.parametrize("attempts", [15, pytest.param(90, marks=pytest.mark.deep)])
async def test_readers_cancelled_at_any_moment_leak_nothing(
    queue: JobQueue, monkeypatch: pytest.MonkeyPatch, attempts: int
) -> None:
    monkeypatch.setattr(queue.inflight, "size_bytes", 4 * MIB)

    async def read() -> None:
        async with queue.stream(counting(50, piece_s=0.002)) as pieces:
            async for _ in pieces:
                await asyncio.sleep(0.001)

    for attempt in range(attempts):
        reader = asyncio.create_task(read())
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


async def test_a_queue_whose_workers_do_not_start_stops_the_others() -> None:
    before = children()
    with pytest.raises(StartupError, match="ended with status 1"):
        async with started(JobQueue(1, LIMITS, MIB, print, ENTRY), JobQueue(2, LIMITS, MIB, print, "no.such.module")):
            pass
    assert children() == before


async def test_stopping_kills_the_workers_and_fails_all_jobs() -> None:
    before = children()
    async with JobQueue(1, LIMITS, MIB, print, ENTRY) as queue:
        hanging = asyncio.create_task(queue.call(Ask("hang")))
        await until(lambda: queue.workers.busy == 1)
        # The task of this job has not taken its first step when the queue stops.
        pieces = await (unstarted := queue.stream(counting(1))).__aenter__()
    assert children() == before
    async with asyncio.timeout(5):
        for waiting in (hanging, anext(pieces), queue.call(counting(1))):
            with pytest.raises(Unavailable, match="stopping"):
                await waiting
        await unstarted.__aexit__(None, None, None)


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


async def test_requests_cancelled_while_they_read_leave_nothing_behind(
    queue: JobQueue, replaced: list[Fault], tmp_path: Path
) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip(10))

    def read(reader: MediaReader) -> int:
        source = path_source("video", "clip.mp4", tmp_path)
        try:
            return len(reader.packets(source).times.ticks)
        finally:
            source.close()

    ends: list[int | BaseException] = []
    for attempt in range(20):
        reader = MediaReader(queue)
        job = asyncio.create_task(asyncio.to_thread(read, reader))
        await asyncio.sleep(attempt * 0.001)
        reader.cancel()
        ends += await asyncio.gather(job, return_exceptions=True)
    assert queue.jobs == 0
    assert await asyncio.to_thread(read, MediaReader(queue)) == 10
    assert {type(each) for each in ends} <= {int, Unavailable}
    assert Unavailable in {type(each) for each in ends}
    assert replaced == []
