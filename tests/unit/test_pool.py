"""Worker processes: what they do to themselves costs one job, and nothing of theirs is left behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from common.errors import FramesieveError, MediaRejected, PeerContract, StartupError
from services.preprocessing.resize import UInt8Array
from services.preprocessing.sources import Source, bytes_source
from services.preprocessing.workers.jobs import Order
from services.preprocessing.workers.limits import Limits
from services.preprocessing.workers.pool import Pool
from services.preprocessing.workers.process import Fault
from services.preprocessing.workers.protocol import Facts

ENTRY = "tests.unit.pool_jobs"
MIB = 2**20
LIMITS = Limits(wall_s=20, memory_bytes=256 * MIB, file_bytes=MIB, frames=1000, length_s=1000, pixels=2**40)


@dataclass(frozen=True, slots=True)
class Ask:
    """A job of `pool_jobs`. Its pieces are (facts, data)."""

    name: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    pieces: int = 1
    piece_bytes: int = MIB
    source: Source = field(default_factory=partial(bytes_source, "video", b"media"))

    def order(self, done: int) -> Order:
        return Order(self.name, {**self.facts, "first": done})

    def piece(self, number: int, facts: Facts, data: UInt8Array) -> tuple[Facts, UInt8Array]:
        return facts, data


def counting(pieces: int, piece_s: float = 0.0) -> Ask:
    return Ask("count", {"piece_s": piece_s}, pieces)


def pieces_made(pieces: list[tuple[Facts, UInt8Array]]) -> list[int]:
    """The numbers that the pieces say and show."""
    for facts, data in pieces:
        assert data.size == MIB
        assert (data == facts.values["number"] % 256).all()
    return [facts.values["number"] for facts, _ in pieces]


def open_descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> set[int]:
    """The workers of this process, which may have other children."""
    found = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {int(each) for each in found if _runs_isolated(Path(f"/proc/{each}/cmdline"))}


def _runs_isolated(command: Path) -> bool:
    try:
        return b"\0-I\0-c\0" in command.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(autouse=True)
async def _nothing_is_left() -> AsyncIterator[None]:
    descriptors, processes = open_descriptors(), children()
    yield
    assert children() == processes
    assert open_descriptors() == descriptors


@pytest.fixture
def replaced() -> list[Fault]:
    return []


@pytest.fixture
def pool_of(replaced: list[Fault]) -> Callable[..., Pool]:
    """Makes a pool of so many workers with `inflight_bytes` and limits."""

    def make(size: int = 1, inflight_bytes: int = 64 * MIB, limits: Limits = LIMITS) -> Pool:
        return Pool(size, limits, inflight_bytes, replaced.append, ENTRY)

    return make


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_pieces_come_in_order_with_what_they_hold(pool_of: Callable[..., Pool]) -> None:
    async with pool_of() as pool, pool.ahead(counting(20)) as pieces:
        assert pieces_made([each async for each in pieces]) == list(range(20))


@pytest.mark.parametrize(
    ("job", "wall_s", "told", "reason"),
    [
        ("crash", 20, r"its decoder crashed \(signal 11\)", Fault.CRASHED),
        ("end", 20, "its decoder ended with status 3", Fault.CRASHED),
        ("hang", 1, "it took more than 1 s", Fault.SLOW),
        ("grow", 20, "it needed more than 256 MiB", Fault.MEMORY),
    ],
)
async def test_a_decoder_that_fails_costs_one_job_and_is_replaced(
    pool_of: Callable[..., Pool], replaced: list[Fault], job: str, wall_s: float, told: str, reason: Fault
) -> None:
    async with pool_of(limits=replace(LIMITS, wall_s=wall_s)) as pool:
        with pytest.raises(MediaRejected, match=rf"^video cannot be decoded: {told}$"):
            await pool.call(Ask(job))
        assert replaced == [reason]
        assert pieces_made([await pool.call(counting(1))]) == [0]
        assert len(children()) == 1


async def test_a_crash_leaves_the_jobs_of_other_workers_alone(pool_of: Callable[..., Pool]) -> None:
    async with pool_of(2) as pool, pool.ahead(counting(20, piece_s=0.02)) as pieces:
        first = await anext(pieces)
        with pytest.raises(MediaRejected, match="signal 11"):
            await pool.call(Ask("crash"))
        assert pieces_made([first, *[each async for each in pieces]]) == list(range(20))


async def test_a_bug_is_nobodys_media_and_told_to_the_log_alone(pool_of: Callable[..., Pool]) -> None:
    async with pool_of() as pool:
        with pytest.raises(PeerContract, match="ZeroDivisionError: secret detail"):
            await pool.call(Ask("bug"))
        assert pieces_made([await pool.call(counting(1))]) == [0]


@pytest.mark.parametrize(
    "what",
    [
        "no json",
        "no object",
        "deep",
        "a long number",
        "too long",
        "other keys",
        "another kind",
        "a job",
        "an end",
        "many descriptors",
        "two arrays",
        "a failure with memory",
        "a failure without reason",
        "unsealed memory",
        "empty memory",
        "too much memory",
        "a socket",
    ],
)
async def test_a_worker_that_breaks_the_contract_is_killed(
    pool_of: Callable[..., Pool], replaced: list[Fault], what: str
) -> None:
    async with pool_of() as pool:
        descriptors = open_descriptors()
        (before,) = children()
        with pytest.raises(PeerContract):
            await pool.call(Ask("say", {"what": what}))
        assert pieces_made([await pool.call(counting(1))]) == [0]
        assert replaced == [Fault.CONTRACT]
        assert before not in children()
        assert open_descriptors() == descriptors


async def test_what_a_worker_started_dies_with_it(pool_of: Callable[..., Pool]) -> None:
    async with pool_of() as pool:
        async with pool.ahead(Ask("fork", pieces=2)) as pieces:
            facts, _ = await anext(pieces)
            child = facts.integer("child", 1, 2**31)
            with pytest.raises(MediaRejected, match="signal 11"):
                await anext(pieces)
        await until(lambda: not _runs(child))


def _runs(pid: int) -> bool:
    """Whether the process runs: whoever adopted it may not have buried it yet."""
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def test_a_worker_that_dies_idle_costs_nobody_anything(
    pool_of: Callable[..., Pool], replaced: list[Fault]
) -> None:
    async with pool_of() as pool:
        (idle,) = children()
        os.kill(idle, signal.SIGKILL)
        await until(lambda: not _runs(idle))
        assert pieces_made([await pool.call(counting(1))]) == [0]
        assert replaced == [Fault.CRASHED]


async def test_time_is_counted_while_the_worker_works_and_not_while_the_reader_does(
    pool_of: Callable[..., Pool],
) -> None:
    limits = replace(LIMITS, wall_s=0.6)
    async with pool_of(inflight_bytes=MIB, limits=limits) as pool:
        async with pool.ahead(counting(5, piece_s=0.02)) as pieces:
            read = []
            async for each in pieces:
                read.append(each)
                await asyncio.sleep(0.25)
        assert pieces_made(read) == list(range(5))
        async with pool.ahead(counting(50, piece_s=0.05)) as pieces:
            with pytest.raises(MediaRejected, match=r"more than 0\.6 s"):
                _ = [each async for each in pieces]


@pytest.mark.parametrize("inflight", [1, 3, 10])
async def test_a_worker_runs_ahead_of_its_reader_by_the_bytes_in_flight(
    pool_of: Callable[..., Pool], inflight: int
) -> None:
    async with pool_of(inflight_bytes=inflight * MIB) as pool:
        descriptors = open_descriptors()
        async with pool.ahead(counting(100)) as pieces:
            first = await anext(pieces)
            await asyncio.sleep(0.3)
            # Every piece that is made and not read holds one descriptor here.
            assert open_descriptors() - descriptors == inflight
            second = await anext(pieces)
            assert pieces_made([first, second]) == [0, 1]
            del first, second
            await asyncio.sleep(0.3)
            assert open_descriptors() - descriptors == inflight


async def test_jobs_share_the_bytes_in_flight_evenly(pool_of: Callable[..., Pool]) -> None:
    async with pool_of(2, inflight_bytes=8 * MIB) as pool:
        descriptors = open_descriptors()
        async with pool.ahead(counting(100, piece_s=0.2)) as greedy:
            await anext(greedy)
            await until(lambda: open_descriptors() - descriptors == 8)
            async with pool.ahead(counting(100)) as late:
                # The first job holds everything, and yet the second has its piece.
                assert pieces_made([await anext(late)]) == [0]
                for _ in range(6):
                    await anext(greedy)
                await asyncio.sleep(1)
                assert open_descriptors() - descriptors == 8
            await asyncio.sleep(0.05)  # what the second held is gone, and the first has made nothing more yet
            assert open_descriptors() - descriptors == 4


async def test_a_slow_reader_gives_its_worker_to_those_who_wait_and_goes_on_where_it_stood(
    pool_of: Callable[..., Pool], replaced: list[Fault]
) -> None:
    async with pool_of(inflight_bytes=2 * MIB) as pool, pool.ahead(counting(12)) as slow:
        read = [await anext(slow)]
        async with asyncio.timeout(5):
            async with pool.ahead(counting(30)) as quick:
                assert pieces_made([each async for each in quick]) == list(range(30))
        read += [each async for each in slow]
        assert pieces_made(read) == list(range(12))
        assert replaced == []


async def test_many_jobs_on_few_workers_all_end(pool_of: Callable[..., Pool], replaced: list[Fault]) -> None:
    async with pool_of(2, inflight_bytes=6 * MIB) as pool:

        async def read(pause_s: float) -> list[int]:
            numbers = []
            async with pool.ahead(counting(15)) as pieces:
                async for facts, _ in pieces:
                    numbers.append(facts.integer("number", 0, 100))
                    await asyncio.sleep(pause_s)
            return numbers

        async with asyncio.timeout(60):
            found = await asyncio.gather(*(read(0.02 * (each % 3)) for each in range(12)))
        assert found == [list(range(15))] * 12
        assert replaced == []


async def test_a_reader_that_leaves_frees_its_worker_at_the_next_piece(
    pool_of: Callable[..., Pool], replaced: list[Fault]
) -> None:
    async with pool_of() as pool:
        descriptors = open_descriptors()
        (worker,) = children()
        async with pool.ahead(counting(1000, piece_s=0.05)) as pieces:
            await anext(pieces)
        assert pieces_made([await pool.call(counting(1))]) == [0]
        assert children() == {worker}
        assert open_descriptors() == descriptors


async def test_a_worker_that_does_not_stop_is_replaced(
    pool_of: Callable[..., Pool], replaced: list[Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.preprocessing.workers.pool._STOP_S", 0.2)
    async with pool_of() as pool:
        asked = asyncio.create_task(pool.call(Ask("hang")))
        await asyncio.sleep(0.2)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert pieces_made([await pool.call(counting(1))]) == [0]
        assert replaced == [Fault.SLOW]


async def test_readers_cancelled_at_any_moment_leak_nothing(pool_of: Callable[..., Pool]) -> None:
    async with pool_of(2, inflight_bytes=4 * MIB) as pool:
        descriptors, processes = open_descriptors(), children()

        async def read() -> None:
            async with pool.ahead(counting(50, piece_s=0.002)) as pieces:
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
                pieces = await stack.enter_async_context(pool.ahead(counting(1)))
                await anext(pieces)
            assert children() == processes
            del pieces
        assert open_descriptors() == descriptors


async def test_leaving_kills_the_workers_and_tells_who_still_reads(pool_of: Callable[..., Pool]) -> None:
    async with pool_of() as pool:
        asked = asyncio.create_task(pool.call(Ask("hang")))
        await asyncio.sleep(0.2)
    assert children() == set()
    with pytest.raises(FramesieveError, match="stopping"):
        await asked


async def test_workers_die_with_their_service_whatever_they_do() -> None:
    program = """
import asyncio, os
from services.preprocessing.workers.pool import Pool
from tests.unit.test_pool import ENTRY, LIMITS, Ask
async def main():
    async with Pool(2, LIMITS, 1, print, ENTRY) as pool:
        asked = asyncio.create_task(pool.call(Ask("hang")))
        await asyncio.sleep(0.2)
        print(open(f"/proc/self/task/{os.getpid()}/children").read(), flush=True)
        os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    workers = [int(each) for each in ended.stdout.split()]
    assert len(workers) == 2, ended.stderr
    await until(lambda: not any(_runs(each) for each in workers))


async def test_a_pool_whose_workers_do_not_start_says_so(replaced: list[Fault]) -> None:
    with pytest.raises(StartupError, match="ended with status 1"):
        async with Pool(2, LIMITS, MIB, replaced.append, "no.such.module"):
            pass


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def test_a_worker_sees_its_media_and_nothing_else(
    pool_of: Callable[..., Pool], port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRAMESIEVE_SECRET", "secret")
    async with pool_of() as pool:
        facts, _ = await pool.call(Ask("confined", {"port": port}))
        (worker,) = children()
        assert Path(f"/proc/{worker}/oom_score_adj").read_text().strip() == "1000"
        groups = os.getpgid(worker), os.getsid(worker)
        environment = {each.split("=")[0] for each in Path(f"/proc/{worker}/environ").read_text().split("\0")}
    seen = dict(facts.values)
    assert groups == (worker, worker)
    assert environment <= {"OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX", "LD_LIBRARY_PATH", ""}
    assert len(seen["descriptors"]) == 3 + 1 + 2  # the standard three, its connection, the job's two files
    assert (seen["core"], seen["no_new_privileges"]) == (0, 1)
    if not _has_landlock():
        pytest.skip("this kernel has no Landlock")
    assert (seen["password"], seen["write"], seen["proc"]) == ("EACCES", "EACCES", "EACCES")
    assert seen["connect"] in ("EACCES", "ENETUNREACH")
    assert seen["signal"] == "EPERM"


def _has_landlock() -> bool:
    return bool(ctypes.CDLL(None).syscall(444, None, 0, 1) >= 1)  # landlock_create_ruleset, asked for its version
