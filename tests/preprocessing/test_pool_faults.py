"""Worker processes: what they do to themselves costs one job, and nothing of theirs is left behind."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

from common.contract.errors import FramesieveError, MediaRejected, Overloaded, PeerContract, StartupError, Unavailable
from services.preprocessing.rpc.planning_threads import PlanningThreads
from services.preprocessing.workers.job_queue import JobQueue
from services.preprocessing.workers.process import Fault
from tests.preprocessing.pool_asks import (
    LIMITS,
    MIB,
    SOURCE,
    Ask,
    children,
    counting,
    no_descriptor_left,
    open_descriptors,
    pieces_made,
    runs,
    until,
)

pytest_plugins = ["tests.preprocessing.fixtures"]
pytestmark = pytest.mark.usefixtures("nothing_is_left")


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
    pool_of: Callable[..., JobQueue], replaced: list[Fault], job: str, wall_s: float, told: str, reason: Fault
) -> None:
    async with pool_of(limits=replace(LIMITS, wall_s=wall_s)) as pool:
        with pytest.raises(MediaRejected, match=rf"^video cannot be decoded: {told}$"):
            await pool.call(Ask(job))
        assert replaced == [reason]
        assert pieces_made([await pool.call(counting(1))]) == [0]
        assert len(children()) == 1


async def test_the_log_names_the_request_whose_worker_is_replaced(pool_of: Callable[..., JobQueue]) -> None:
    loop = asyncio.get_running_loop()

    def from_a_thread() -> object:  # as those that plan do
        return asyncio.run_coroutine_threadsafe(pool.call(Ask("crash")), loop).result()

    with structlog.testing.capture_logs([structlog.contextvars.merge_contextvars]) as logged:
        async with pool_of() as pool, PlanningThreads(1) as planning:
            with structlog.contextvars.bound_contextvars(request_id="first"), pytest.raises(MediaRejected):
                await pool.call(Ask("crash"))
            with structlog.contextvars.bound_contextvars(request_id="second"), pytest.raises(MediaRejected):
                await planning.call(from_a_thread)
            assert pieces_made([await pool.call(counting(1))]) == [0]
    assert [line["request_id"] for line in logged if line["event"] == "worker replaced"] == ["first", "second"]


async def test_a_crash_leaves_the_jobs_of_other_workers_alone(pool_of: Callable[..., JobQueue]) -> None:
    async with pool_of(2) as pool, pool.stream(counting(20, piece_s=0.02)) as pieces:
        first = await anext(pieces)
        with pytest.raises(MediaRejected, match="signal 11"):
            await pool.call(Ask("crash"))
        assert pieces_made([first, *[each async for each in pieces]]) == list(range(20))


async def test_an_array_that_no_descriptor_is_free_for_costs_its_request_and_no_worker(
    pool_of: Callable[..., JobQueue], replaced: list[Fault]
) -> None:
    async with pool_of(inflight_bytes=MIB) as pool:
        before = children()
        async with pool.stream(counting(20)) as pieces:
            read = [await anext(pieces)]
            with no_descriptor_left(), pytest.raises(Overloaded, match=r"^video .*: Too many open files$"):
                read += [each async for each in pieces]
            assert pieces_made(read) == [0]
        with no_descriptor_left(), pytest.raises(Overloaded, match=r"^video .*: Too many open files$"):
            await pool.call(counting(1))  # for which the worker was not even told of it
        assert pieces_made([await pool.call(counting(1))]) == [0]
        assert children() == before
        assert replaced == []


async def test_an_array_that_no_memory_is_free_for_costs_its_request_and_no_worker(
    pool_of: Callable[..., JobQueue], replaced: list[Fault], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    async with pool_of() as pool:
        monkeypatch.setattr(mmap, "mmap", lacking)
        with pytest.raises(Overloaded, match=r"^video .*: Cannot allocate memory$"):
            await pool.call(counting(1))
        monkeypatch.undo()
        assert pieces_made([await pool.call(counting(1))]) == [0]
        assert replaced == []


async def test_a_worker_waits_while_too_many_descriptors_are_on_their_way(
    pool_of: Callable[..., JobQueue], replaced: list[Fault]
) -> None:
    async with pool_of() as pool:
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with near, far:
            for _ in range(40):  # a worker may have 32 open; the system counts those of one user together
                socket.send_fds(near, [b"-"], [SOURCE.descriptor])
            called = asyncio.create_task(pool.call(counting(1)))
            await asyncio.wait([called], timeout=0.3)
        assert pieces_made([await called]) == [0]
        assert replaced == []


async def test_a_bug_is_nobodys_media_and_told_to_the_log_alone(pool_of: Callable[..., JobQueue]) -> None:
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
    pool_of: Callable[..., JobQueue], replaced: list[Fault], what: str
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


async def test_what_a_worker_started_dies_with_it(pool_of: Callable[..., JobQueue]) -> None:
    async with pool_of() as pool:
        async with pool.stream(Ask("fork", pieces=2)) as pieces:
            facts, _ = await anext(pieces)
            child = facts.integer("child", 1, 2**31)
            with pytest.raises(MediaRejected, match="signal 11"):
                await anext(pieces)
        await until(lambda: not runs(child))


async def test_a_worker_that_dies_idle_costs_nobody_anything(
    pool_of: Callable[..., JobQueue], replaced: list[Fault]
) -> None:
    async with pool_of() as pool:
        (idle,) = children()
        os.kill(idle, signal.SIGKILL)
        await until(lambda: not runs(idle))
        assert pieces_made([await pool.call(counting(1))]) == [0]
        assert replaced == [Fault.CRASHED]


async def test_a_worker_that_does_not_stop_is_replaced(pool_of: Callable[..., JobQueue], replaced: list[Fault]) -> None:
    async with pool_of() as pool:
        asked = asyncio.create_task(pool.call(Ask("hang")))
        await asyncio.sleep(0.2)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert pieces_made([await pool.call(counting(1))]) == [0]
        assert replaced == [Fault.ABANDONED]


async def test_leaving_kills_the_workers_and_tells_who_still_reads(pool_of: Callable[..., JobQueue]) -> None:
    async with pool_of() as pool:
        asked = asyncio.create_task(pool.call(Ask("hang")))
        await asyncio.sleep(0.2)
    assert children() == set()
    with pytest.raises(FramesieveError, match="stopping"):
        await asked


async def test_a_job_that_is_asked_for_while_the_pool_is_left_is_told(pool_of: Callable[..., JobQueue]) -> None:
    async with pool_of() as pool:
        pieces = await (running := pool.stream(counting(1))).__aenter__()
        # Nothing is awaited between: what makes the pieces is yet to take its first step.
    async with asyncio.timeout(5):
        with pytest.raises(Unavailable, match="stopping"):
            await anext(pieces)
        await running.__aexit__(None, None, None)


async def test_workers_die_with_their_service_whatever_they_do() -> None:
    program = """
import asyncio, os
from services.preprocessing.workers.job_queue import Pool
from tests.preprocessing.pool_asks import ENTRY, LIMITS, Ask
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
    await until(lambda: not any(runs(each) for each in workers))


async def test_a_pool_whose_workers_do_not_start_says_so(replaced: list[Fault]) -> None:
    with pytest.raises(StartupError, match="ended with status 1"):
        async with JobQueue(2, LIMITS, MIB, replaced.append, "no.such.module"):
            pass


async def test_a_pool_whose_workers_the_system_has_no_room_for_says_so(
    pool_of: Callable[..., JobQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "Popen", lacking)
    with pytest.raises(StartupError, match=r"do not start: .*Resource temporarily unavailable"):
        async with pool_of(2):
            pass


async def test_a_pool_is_unable_while_no_worker_starts_and_able_again_once_one_does(
    pool_of: Callable[..., JobQueue], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_of(2) as pool:
        monkeypatch.setattr(pool.workers, "_entry", "no.such.module")
        with pytest.raises(MediaRejected):
            await pool.call(Ask("crash"))
        await until(lambda: len(children()) == 1)
        assert pool.workers.healthy
        with pytest.raises(MediaRejected):
            await pool.call(Ask("crash"))
        await until(lambda: not pool.workers.healthy)
        monkeypatch.undo()
        await until(lambda: pool.workers.healthy)
        assert pieces_made([await pool.call(counting(1))]) == [0]


@pytest.fixture
def port() -> Iterator[int]:
    """Of a server on this machine."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


async def test_a_worker_sees_its_media_and_nothing_else(
    pool_of: Callable[..., JobQueue], port: int, monkeypatch: pytest.MonkeyPatch
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
