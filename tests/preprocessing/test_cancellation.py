"""A request that is cancelled in any stage stops what runs for it, and releases its files, memory and workers.

The fixture `service` checks at the end that nothing is held.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import grpc
import pytest
from prometheus_client import REGISTRY

from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.workers import worker_pool
from gridsieve.services.preprocessing.workers.process import Fault
from tests.awake import SOON_S, awake
from tests.preprocessing.preprocessing_media import clip
from tests.preprocessing.service import EVERYTHING, Service, prompt_of, sent, serves, stopped, video
from tests.preprocessing.worker_jobs import open_paths, until
from tests.processes import runs

pytestmark = pytest.mark.asyncio(loop_scope="session")

CLIP = prompt_of(video(clip(30)))


def requests_running() -> float:
    return REGISTRY.get_sample_value("gridsieve_requests_running", {"method": "Preprocess"}) or 0.0


async def test_cancelling_while_a_file_is_hashed_frees_its_thread_within_a_second(service: Service, stub: Any) -> None:
    large = service.media_root / "large.mp4"
    large.touch()
    os.truncate(large, 12 * 2**30)
    call = await sent(stub, prompt_of(video(path="large.mp4")))
    await until(lambda: large in open_paths())
    call.cancel()
    with awake() as passed_s:
        await until(lambda: large not in open_paths())
        assert passed_s() < SOON_S
    assert await serves(stub, CLIP) == [0]  # on the only thread


async def test_files_are_closed_once_a_cancelled_plan_ends(
    service: Service, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned, cancelled = threading.Event(), threading.Event()
    plan = Planner.plan

    def slowly(*arguments: Any) -> Any:
        made = plan(*arguments)
        planned.set()
        cancelled.wait(10)
        return made

    monkeypatch.setattr(Planner, "plan", slowly)
    path = service.media_root / "clip.mp4"
    path.write_bytes(clip(30))
    call = await sent(stub, prompt_of(video(path="clip.mp4")))
    await until(planned.is_set)
    call.cancel()
    await asyncio.sleep(0.1)
    assert path in open_paths()
    cancelled.set()
    await until(lambda: path not in open_paths())


async def test_cancelling_ends_a_worker_that_hangs_within_a_second(
    service: Service, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "_STOP_S", 0.5)
    queue = service.queues.decoding
    with stopped(queue) as pid:
        call = await sent(stub, CLIP, EVERYTHING)
        await until(lambda: queue.jobs == 1 and requests_running() == 1)
        call.cancel()
        with awake() as passed_s:
            await until(lambda: not runs(pid))
            assert passed_s() < SOON_S
    assert await serves(stub, CLIP) == [0]  # with the only thread and the new worker
    assert service.queues.replaced == [Fault.ABANDONED]
    service.queues.replaced.clear()


@pytest.mark.parametrize("stage", ["for a thread", "for a worker"])
async def test_a_request_that_is_cancelled_while_it_waits_leaves_its_queue(service: Service, stage: str) -> None:
    selects = [EVERYTHING] * (stage == "for a worker")
    queue = service.queues.decoding if selects else service.queues.reading
    async with service.serving(threads=1 if stage == "for a thread" else 2) as stub:
        with stopped(queue) as pid:
            first = await sent(stub, CLIP, *selects)
            await until(lambda: queue.jobs == 1)
            second = await sent(stub, CLIP, *selects)
            await until(lambda: queue.jobs == (1 if stage == "for a thread" else 2))
            await asyncio.sleep(0.1)
            second.cancel()
            await until(lambda: requests_running() == 1 and queue.jobs == 1)
            os.kill(pid, signal.SIGCONT)
            await first.done_writing()
            while await first.read() is not grpc.aio.EOF:
                pass
