"""A fault of a worker process costs one job: the worker is replaced, confined, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import socket
from pathlib import Path

import pytest

from gridsieve.common.contract.errors import MediaRejected, Overloaded, PeerContract
from gridsieve.common.sealed_memory import SealedMemory, sealed
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.process import Fault
from gridsieve.services.preprocessing.workers.protocol import receive
from tests.preprocessing.misbehaving_worker import MALFORMED
from tests.preprocessing.worker_jobs import (
    ENTRY,
    LIMITS,
    MIB,
    SOURCE,
    Ask,
    counting,
    no_descriptor_left,
    open_descriptors,
    pieces_made,
    until,
)
from tests.processes import children, runs

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def serves_the_next_job(queue: JobQueue) -> None:
    assert pieces_made([await queue.call(counting(1))]) == [0]


@pytest.mark.parametrize(
    ("job", "text", "fault"),
    [
        ("crash", r"its decoder crashed \(signal 11\)", Fault.CRASHED),
        ("end", "its decoder ended with status 3", Fault.CRASHED),
    ],
)
async def test_a_worker_that_fails_costs_one_job_and_is_replaced(
    queue: JobQueue, replaced: list[Fault], job: str, text: str, fault: Fault
) -> None:
    with pytest.raises(MediaRejected, match=rf"^video cannot be decoded: {text}$"):
        await queue.call(Ask(job))
    assert replaced == [fault]
    replaced.clear()
    await serves_the_next_job(queue)


async def test_children_of_a_worker_die_with_it(queue: JobQueue, replaced: list[Fault]) -> None:
    async with queue.stream(Ask("fork", pieces=2)) as pieces:
        facts, _ = await anext(pieces)
        child = facts.integer("child", 1, 2**31)
        with pytest.raises(MediaRejected, match="signal 11"):
            await anext(pieces)
    await until(lambda: not runs(child))
    replaced.clear()


async def test_a_bug_of_a_worker_is_not_blamed_on_the_media(queue: JobQueue, replaced: list[Fault]) -> None:
    with pytest.raises(PeerContract, match="ZeroDivisionError: secret detail"):
        await queue.call(Ask("bug"))
    await serves_the_next_job(queue)
    assert replaced == [Fault.CONTRACT]
    replaced.clear()


async def test_without_free_descriptors_a_request_is_overloaded_and_no_worker_is_replaced(queue: JobQueue) -> None:
    queue.inflight.size_bytes = MIB
    async with queue.stream(counting(20)) as pieces:
        await anext(pieces)
        with no_descriptor_left(), pytest.raises(Overloaded, match=r"^video .*: Too many open files$"):
            _ = [each async for each in pieces]
    with no_descriptor_left(), pytest.raises(Overloaded, match=r"^video .*: Too many open files$"):
        await queue.call(counting(1))  # not even the job can be sent
    await serves_the_next_job(queue)


async def test_a_worker_retries_while_too_many_descriptors_are_in_flight(queue: JobQueue) -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        for _ in range(40):  # a worker may have 32 open; Linux counts those in flight of one user together
            socket.send_fds(near, [b"-"], [SOURCE.descriptor])
        called = asyncio.create_task(queue.call(counting(1)))
        await asyncio.wait([called], timeout=0.3)
    assert pieces_made([await called]) == [0]


@pytest.mark.parametrize("what", MALFORMED)
async def test_a_malformed_message_breaks_the_contract_and_leaks_no_descriptor(what: str) -> None:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with near, far:
        before = open_descriptors()
        socket.send_fds(near, [MALFORMED[what]], [SOURCE.descriptor])
        with pytest.raises(PeerContract):
            receive(far)
        assert open_descriptors() == before


async def test_memory_that_could_change_or_has_a_wrong_size_breaks_the_contract() -> None:
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.truncate(unsealed, MIB)
    near, far = socket.socketpair()
    far.close()
    before = open_descriptors()
    content = SealedMemory(sealed(memoryview(b"abc"))).mapped(MIB)
    for wrong in (unsealed, near.detach(), sealed(memoryview(b"")), sealed(memoryview(bytes(MIB + 1)))):
        with pytest.raises(PeerContract):
            SealedMemory(wrong).mapped(MIB)
    assert open_descriptors() == before - 2  # `unsealed` and `near` are closed
    assert content.tolist() == [97, 98, 99]


@pytest.mark.parametrize("what", ["no json", "two arrays", "an end", "a failure without reason"])
async def test_a_worker_that_breaks_the_contract_is_killed(queue: JobQueue, replaced: list[Fault], what: str) -> None:
    (before,) = queue.workers._workers
    with pytest.raises(PeerContract):
        await queue.call(Ask("say", {"what": what}))
    await serves_the_next_job(queue)
    assert replaced == [Fault.CONTRACT]
    replaced.clear()
    assert before.pid not in children()


async def test_a_worker_sees_its_media_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    of_machine = {"OPENBLAS_VERBOSE": "0", "OMP_DYNAMIC": "FALSE", "MKL_CBWR": "COMPATIBLE"}
    for name, value in {**of_machine, "OPENBLAS_NUM_THREADS": "2", "GRIDSIEVE_SECRET": "secret"}.items():
        monkeypatch.setenv(name, value)
    others = children()
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with JobQueue(1, LIMITS, MIB, print, ENTRY) as queue:
            facts, _ = await queue.call(Ask("confined", {"port": server.getsockname()[1]}))
            (worker,) = children() - others
            assert Path(f"/proc/{worker}/oom_score_adj").read_text().strip() == "1000"
            groups = os.getpgid(worker), os.getsid(worker)
            told = queue.workers.confined_by
            environment = dict(re.findall(r"([^=\0]+)=([^\0]*)", Path(f"/proc/{worker}/environ").read_text()))
    seen = dict(facts.values)
    assert groups == (worker, worker)
    assert environment.items() >= {**of_machine, "OPENBLAS_NUM_THREADS": "1"}.items()
    others_kept = {name for name in environment if not name.startswith(("OPENBLAS_", "OMP_", "MKL_", "CUDA_"))}
    own = {"MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
    assert own <= others_kept <= own | {"LD_LIBRARY_PATH"}
    assert len(seen["descriptors"]) == 3 + 1 + 2  # the standard three, its connection, the job's two files
    assert (seen["core"], seen["no_new_privileges"]) == (0, 1)
    if ctypes.CDLL(None).syscall(444, None, 0, 1) < 1:  # landlock_create_ruleset, asked for its version
        assert "landlock" not in told
        pytest.skip("this kernel has no Landlock")
    assert "landlock" in told
    assert (seen["password"], seen["write"], seen["proc"]) == ("EACCES", "EACCES", "EACCES")
    assert seen["connect"] in ("EACCES", "ENETUNREACH")
    assert seen["signal"] == "EPERM"
