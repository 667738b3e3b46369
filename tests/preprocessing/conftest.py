"""Fixtures of preprocessing's tests: worker processes, and the whole service."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.preprocessing.rpc import servicer
from services.preprocessing.video.slices import PlannedMedia, PlannedVideo
from services.preprocessing.workers import worker_pool
from services.preprocessing.workers.job_queue import JobQueue
from services.preprocessing.workers.jobs import Job, VideoSlices, slices_job
from services.preprocessing.workers.process import Fault
from tests.preprocessing.service import Queues, running_queues, serving
from tests.preprocessing.worker_jobs import ENTRY, LIMITS, MIB, children, open_descriptors, until


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


@pytest_asyncio.fixture(loop_scope="module")
async def queue(
    running_queue: tuple[JobQueue, list[Fault]], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[JobQueue]:
    """The module's queue, idle. The test must leave its worker idle, and no job, byte or descriptor behind."""
    queue, faults = running_queue
    faults.clear()
    # A worker that stops late because the machine is busy must not be replaced.
    monkeypatch.setattr(worker_pool, "_STOP_S", 20.0)
    descriptors = open_descriptors()
    yield queue
    await until(lambda: queue.workers._idle.qsize() == queue.workers.size)
    assert (queue.jobs, queue.inflight_bytes, queue.workers.busy, queue.workers.waiting) == (0, 0, 0, 0)
    await until(lambda: open_descriptors() <= descriptors)
    assert len(children()) >= queue.workers.size


@pytest.fixture
def replaced(running_queue: tuple[JobQueue, list[Fault]]) -> list[Fault]:
    """Why workers of `queue` were replaced."""
    return running_queue[1]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def queues() -> AsyncIterator[Queues]:
    """A reading and a decoding queue of one worker each, of which no worker may be replaced."""
    async with running_queues() as made:
        yield made
        assert made.replaced == []


@pytest_asyncio.fixture(loop_scope="module")
async def stub(tiny_checkpoint: Path, tmp_path: Path, queues: Queues) -> AsyncIterator[Any]:
    """A stub to a service whose media root is `media` below tmp_path."""
    (tmp_path / "media").mkdir()
    async with serving(tiny_checkpoint, tmp_path / "media", tmp_path, queues) as made:
        yield made
    assert queues.counters == (0, 0, 0)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every frame that arrives from a worker."""
    frames: list[int] = []

    class Watched(VideoSlices):
        def piece(self, *arguments: Any) -> Any:
            made = VideoSlices.piece(self, *arguments)
            frames.extend(range(made.first_frame, made.first_frame + len(made.pixels)))
            return made

    def watched(media: PlannedMedia) -> Job[Any] | None:
        return Watched(media) if isinstance(media, PlannedVideo) else slices_job(media)

    monkeypatch.setattr(servicer, "slices_job", watched)
    return frames
