"""Fixtures of preprocessing's tests: worker processes, and the whole service."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import pytest_asyncio

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.video.slices import Slice
from gridsieve.services.preprocessing.workers import worker_pool
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.jobs import VideoSlices
from gridsieve.services.preprocessing.workers.process import Fault
from tests.preprocessing.media_server import fetched_files
from tests.preprocessing.service import Queues, Service, running_queues
from tests.preprocessing.worker_jobs import ENTRY, LIMITS, MIB, open_descriptors, open_memories, until

# A worker that stops late because the machine is busy must not be replaced.
PATIENT_S = 20.0


@pytest.fixture(scope="session", params=["qwen2_5_vl", "qwen3_vl"])
def family(request: pytest.FixtureRequest) -> str:
    """Qwen2-VL, Qwen3.5 and those of experts sample and size as these two. test_families.py has the others."""
    name: str = request.param
    return name


@pytest.fixture(scope="session", autouse=True)
def cheap_garbage_collection() -> None:
    """Exempts imported modules from garbage collection: tests that count descriptors collect before they count."""
    gc.collect()
    gc.freeze()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_queue(request: pytest.FixtureRequest) -> AsyncIterator[tuple[JobQueue, list[Fault]]]:
    """A queue, and the faults of replaced workers. A module may define its own LIMITS and number of WORKERS."""
    faults: list[Fault] = []
    limits, workers = getattr(request.module, "LIMITS", LIMITS), getattr(request.module, "WORKERS", 1)
    async with JobQueue(workers, limits, 64 * MIB, faults.append, ENTRY) as queue:
        yield queue, faults


@pytest.fixture
def replaced(running_queue: tuple[JobQueue, list[Fault]]) -> list[Fault]:
    """Why workers of `queue` were replaced. A test that expects it clears the list."""
    return running_queue[1]


@pytest_asyncio.fixture(loop_scope="module")
async def queue(
    running_queue: tuple[JobQueue, list[Fault]], replaced: list[Fault], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[JobQueue]:
    """The module's queue. The test must leave its workers idle, and no job, byte or descriptor behind."""
    queue, _ = running_queue
    queue.inflight.size_bytes = 64 * MIB
    monkeypatch.setattr(worker_pool, "_STOP_S", PATIENT_S)
    descriptors = open_descriptors()
    yield queue
    await until(lambda: len(queue.workers._idle) == queue.workers.size)
    assert (queue.jobs, queue.inflight.held_bytes, queue.workers.busy, queue.workers.waiting) == (0, 0, 0, 0)
    await until(lambda: open_descriptors() <= descriptors)
    assert replaced == []


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def queues() -> AsyncIterator[Queues]:
    """Tests leave them idle, with every replaced worker explained."""
    with mock.patch.object(worker_pool, "_STOP_S", PATIENT_S):  # also of jobs that stop after their test
        async with running_queues() as made:
            yield made


@pytest.fixture(scope="module")
def tiny_planner(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Planner, Path]:
    """A planner, and its media root."""
    media_root = tmp_path_factory.mktemp("media")
    return Planner(Checkpoint(tiny_checkpoint), media_root), media_root


@pytest_asyncio.fixture(loop_scope="session")
async def service(tiny_planner: tuple[Planner, Path], tmp_path: Path, queues: Queues) -> AsyncIterator[Service]:
    """At the end it must hold no job, bytes, memory and file, and no worker may have been replaced."""
    memories = open_memories()
    yield Service(*tiny_planner, tmp_path, queues)
    await until(lambda: queues.counters == (0, 0, 0) and open_memories() <= memories and not fetched_files(tmp_path))
    await until(lambda: queues.idle)  # the loop stands still between tests, and the time to stop goes on
    found = queues.replaced.copy()
    queues.replaced.clear()  # or each later test would fail, too
    assert found == []


@pytest_asyncio.fixture(loop_scope="session")
async def stub(service: Service) -> AsyncIterator[Any]:
    async with service.serving() as made:
        yield made


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every frame that arrives from a worker."""
    frames: list[int] = []
    piece = VideoSlices.piece

    def watched(*arguments: Any) -> Slice:
        made = piece(*arguments)
        frames.extend(range(made.first_frame, made.first_frame + len(made.pixels)))
        return made

    monkeypatch.setattr(VideoSlices, "piece", watched)
    return frames
