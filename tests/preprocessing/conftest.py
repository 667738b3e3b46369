"""Fixtures of preprocessing's tests: worker processes, and the whole service."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

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


# Those of Qwen3.5 are Qwen3-VL's but for their levels.
DEEP = ("qwen3_5", "qwen3_5_moe")


@pytest.fixture(
    scope="session",
    params=[
        *("qwen2_5_vl", "qwen2_vl", "qwen3_vl"),
        *(pytest.param(name, marks=pytest.mark.deep) for name in DEEP),
    ],
)
def family(request: pytest.FixtureRequest) -> str:
    """The families that sample videos; Qwen3-VL-MoE is Qwen3-VL here. test_llava.py has the others."""
    name: str = request.param
    return name


@pytest.fixture(scope="session", autouse=True)
def cheap_garbage_collection() -> None:
    """Exempts imported modules from garbage collection: tests that count descriptors collect before they count."""
    gc.collect()
    gc.freeze()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running_queue(request: pytest.FixtureRequest) -> AsyncIterator[tuple[JobQueue, list[Fault]]]:
    """A queue with one worker, and the faults of replaced workers. A module may define its own LIMITS."""
    faults: list[Fault] = []
    limits = getattr(request.module, "LIMITS", LIMITS)
    async with JobQueue(1, limits, 64 * MIB, faults.append, ENTRY) as queue:
        yield queue, faults


@pytest.fixture
def replaced(running_queue: tuple[JobQueue, list[Fault]]) -> list[Fault]:
    """Why workers of `queue` were replaced. A test that expects it clears the list."""
    return running_queue[1]


@pytest_asyncio.fixture(loop_scope="module")
async def queue(
    running_queue: tuple[JobQueue, list[Fault]], replaced: list[Fault], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[JobQueue]:
    """The module's queue. The test must leave its worker idle, and no job, byte or descriptor behind."""
    queue, _ = running_queue
    queue.inflight.size_bytes = 64 * MIB
    monkeypatch.setattr(worker_pool, "_STOP_S", PATIENT_S)
    descriptors = open_descriptors()
    yield queue
    await until(lambda: queue.workers._idle.qsize() == queue.workers.size)
    assert (queue.jobs, queue.inflight_bytes, queue.workers.busy, queue.workers.waiting) == (0, 0, 0, 0)
    await until(lambda: open_descriptors() <= descriptors)
    assert replaced == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def queues() -> AsyncIterator[Queues]:
    """A reading and a decoding queue of one worker each."""
    async with running_queues() as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def service(
    tiny_checkpoint: Path, tmp_path: Path, queues: Queues, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    """At the end it must hold no job, bytes, memory and file, and no worker may have been replaced."""
    monkeypatch.setattr(worker_pool, "_STOP_S", PATIENT_S)
    (tmp_path / "media").mkdir()
    memories = open_memories()
    yield Service(tiny_checkpoint, tmp_path, queues)
    await until(lambda: queues.counters == (0, 0, 0) and open_memories() <= memories and not fetched_files(tmp_path))
    assert queues.replaced == []


@pytest_asyncio.fixture(loop_scope="module")
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
