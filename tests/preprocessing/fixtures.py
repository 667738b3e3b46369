"""Fixtures that several files of preprocessing's tests share: worker processes, the whole service, names of no system.

A file that uses them names this one as its `pytest_plugins`.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.preprocessing.rpc import servicer
from services.preprocessing.video.slices import PlannedMedia, PlannedVideo
from services.preprocessing.workers import worker_pool
from services.preprocessing.workers.job_queue import JobQueue
from services.preprocessing.workers.jobs import Job, VideoSlices, slices_job
from services.preprocessing.workers.limits import Limits
from services.preprocessing.workers.process import Fault
from tests.preprocessing.pool_asks import ENTRY, LIMITS, MIB, children, open_descriptors
from tests.preprocessing.service import Pools, running_pools, serving


@pytest.fixture
async def nothing_is_left() -> AsyncIterator[None]:
    """Holds a test to leaving no worker and no descriptor behind."""
    descriptors, processes = open_descriptors(), children()
    yield
    assert children() == processes
    assert open_descriptors() <= descriptors  # what earlier tests forgot may go meanwhile


@pytest.fixture
def no_stop_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps workers that others' work on this machine keeps from stopping at once."""
    monkeypatch.setattr(worker_pool, "_STOP_S", 20.0)


@pytest.fixture
def replaced() -> list[Fault]:
    """Why workers of `pool_of` were replaced."""
    return []


@pytest.fixture
def pool_of(replaced: list[Fault]) -> Callable[..., JobQueue]:
    """Makes a pool of so many workers with `inflight_bytes` and limits."""

    def make(size: int = 1, inflight_bytes: int = 64 * MIB, limits: Limits = LIMITS) -> JobQueue:
        return JobQueue(size, limits, inflight_bytes, replaced.append, ENTRY)

    return make


@pytest.fixture
def no_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails a test that asks the system for a name's addresses."""
    resolve = socket.getaddrinfo

    def numeric_only(host: str | None, *arguments: object, **options: object) -> object:
        return resolve(host, *arguments, **{**options, "flags": socket.AI_NUMERICHOST})  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", numeric_only)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pools() -> AsyncIterator[Pools]:
    """Of one worker each, which must all be there in the end."""
    async with running_pools() as made:
        yield made
        assert made.replaced == []


@pytest_asyncio.fixture(loop_scope="module")
async def stub(tiny_checkpoint: Path, tmp_path: Path, pools: Pools) -> AsyncIterator[Any]:
    """Of a service whose media root is `media` below tmp_path."""
    (tmp_path / "media").mkdir()
    async with serving(tiny_checkpoint, tmp_path / "media", tmp_path, pools) as made:
        yield made
    assert pools.counters == (0, 0, 0)


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every frame that comes out of a worker."""
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
