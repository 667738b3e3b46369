"""A request's reading ends when the request leaves, and never after its file is gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from common.contract.errors import Unavailable
from services.preprocessing.sources.source import path_source
from services.preprocessing.workers.job_queue import JobQueue
from services.preprocessing.workers.media_reader import MediaReader
from services.preprocessing.workers.process import Fault
from tests.preprocessing.pool_asks import SOURCE
from tests.preprocessing.preprocessing_media import clip

pytest_plugins = ["tests.preprocessing.fixtures"]
pytestmark = pytest.mark.usefixtures("nothing_is_left", "no_stop_is_late")


async def test_nothing_is_read_for_a_request_that_has_left(pool_of: Callable[..., JobQueue]) -> None:
    async with pool_of() as pool:
        reading = MediaReader(pool)
        reading.cancel()
        for read in (reading.packets, reading.picture):
            with pytest.raises(Unavailable, match="was cancelled"):
                await asyncio.to_thread(read, SOURCE)
        assert pool.jobs == 0


async def test_a_plan_is_wanted_until_its_request_leaves(pool_of: Callable[..., JobQueue]) -> None:
    async with pool_of() as pool:
        reading = MediaReader(pool)
        reading.check_cancelled()
        reading.cancel()
        with pytest.raises(Unavailable, match="was cancelled"):
            reading.check_cancelled()


async def test_requests_that_leave_at_any_moment_leave_nothing_behind(
    pool_of: Callable[..., JobQueue], replaced: list[Fault], tmp_path: Path
) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip(10))

    def read(reading: MediaReader) -> int:
        source = path_source("video", "clip.mp4", tmp_path)
        try:
            return len(reading.packets(source).times.ticks)
        finally:
            source.close()

    ends: list[int | BaseException] = []
    async with pool_of() as pool:
        for attempt in range(40):
            reading = MediaReader(pool)
            job = asyncio.create_task(asyncio.to_thread(read, reading))
            await asyncio.sleep(attempt * 0.0005)
            reading.cancel()
            ends += await asyncio.gather(job, return_exceptions=True)
        assert pool.jobs == 0
        assert await asyncio.to_thread(read, MediaReader(pool)) == 10
    assert {type(each) for each in ends} <= {int, Unavailable}
    assert Unavailable in {type(each) for each in ends}
    assert replaced == []
