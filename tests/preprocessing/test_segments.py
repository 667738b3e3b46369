"""A long video is decoded on idle workers side by side, and comes out as from one."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from gridsieve.common.contract.errors import MediaDamaged
from gridsieve.services.preprocessing.rpc import decode_stats
from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.packets import read_packets
from gridsieve.services.preprocessing.video.slices import PlannedVideo, Slice
from gridsieve.services.preprocessing.workers import job_queue, segments
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.jobs import VideoSlices
from gridsieve.services.preprocessing.workers.process import WorkerProcess
from gridsieve.services.preprocessing.workers.segments import slices_of
from tests.preprocessing.preprocessing_media import HEIGHT_PX, WIDTH_PX, clip, without_packets
from tests.preprocessing.test_worker_media import assert_equal
from tests.preprocessing.worker_jobs import counting, read

pytestmark = pytest.mark.asyncio(loop_scope="module")
WORKERS = 2
GOP, FRAMES = 10, 120
DATA = clip(FRAMES, 25, "matroska", "mpeg4", {"g": str(GOP), "bf": "0"})
KEYFRAMES = clip(FRAMES, 25, "matroska", "mjpeg")


@pytest.fixture(autouse=True)
def short_videos_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_MIN_PX", 0)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(begin, end, pieces done before) of each video job that is given to a worker."""
    sent: list[tuple[int, int, int]] = []
    send = job_queue._send_job

    def recorded(worker: WorkerProcess, job: object, done: int) -> None:
        if isinstance(job, VideoSlices):
            sent.append((job.begin, job.end, done))
        send(worker, job, done)  # type: ignore[arg-type]

    monkeypatch.setattr(job_queue, "_send_job", recorded)
    return sent


def planned(data: bytes, step: int = 2) -> PlannedVideo:
    source = bytes_source("video", data)
    return PlannedVideo(source, read_packets(source), tuple(range(0, FRAMES, step)), 2, (HEIGHT_PX, WIDTH_PX))


async def segmented(queue: JobQueue, video: PlannedVideo) -> list[Slice]:
    async with slices_of(queue, VideoSlices(video)) as slices:
        return [each async for each in slices]


async def test_two_workers_make_what_one_makes(queue: JobQueue, jobs: list[tuple[int, int, int]]) -> None:
    video = planned(DATA)
    assert_equal(await segmented(queue, video), list(video.slices()))
    assert jobs == [(0, 15, 0), (15, 30, 0)]  # slice 15 begins with frame 60, a keyframe


@pytest.mark.parametrize(
    ("damaged", "remade"),
    [([60], True), ([58, 59, 60, 61], True), ([4, 62, 100], False)],
)
async def test_damage_is_repaired_as_by_one_worker(
    queue: JobQueue, jobs: list[tuple[int, int, int]], damaged: list[int], remade: bool
) -> None:
    """Where a segment begins with damage, the other worker has the frame before."""
    video = planned(without_packets(KEYFRAMES, damaged), step=1)
    alone = list(video.slices())
    assert sum(each.repaired_frames for each in alone) == len(damaged)
    assert_equal(await segmented(queue, video), alone)
    assert jobs == [(0, 30, 0), (30, 60, 0), *[(30, 60, 0)] * remade]


async def test_damage_of_all_segments_counts_together(queue: JobQueue) -> None:
    damaged = [*range(21, 28), *range(91, 98)]
    with pytest.raises(
        MediaDamaged, match=r"video is damaged: \d+ of its 120 frames cannot be decoded, at most a tenth"
    ):
        await segmented(queue, planned(without_packets(DATA, damaged), step=1))


async def test_a_segment_gives_way_to_a_job_that_waits(queue: JobQueue, jobs: list[tuple[int, int, int]]) -> None:
    """Neither segment is read meanwhile: both may be made whole, since there is room for them."""
    video = planned(clip(2000, 25, "matroska", "mpeg4", {"g": str(GOP), "bf": "0"}), step=1)
    video = PlannedVideo(video.source, video.index, tuple(range(2000)), 2, (480, 640))
    queue.inflight.size_bytes = 2**30
    async with slices_of(queue, VideoSlices(video)) as slices, aclosing(slices):
        await anext(slices)
        await asyncio.wait_for(read(queue, counting(1)), 20)
        async with asyncio.timeout(20):
            while len(jobs) < 3:
                await anext(slices)
    begin, end, done = jobs[2]
    assert (begin, end) == jobs[1][:2]
    assert done > 0


async def test_the_spans_of_decoding_end_when_the_last_slice_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is not the last in order where a second worker is faster, nor does the first in order begin them."""
    spans: dict[str, tuple[int, int]] = {}
    monkeypatch.setattr(
        decode_stats, "record", lambda stage, began, ended, *_, **__: spans.update({stage: (began, ended)})
    )
    nothing = np.empty((1, 0, 0, 3), np.uint8)
    with decode_stats.DecodeStats(0) as stats:
        for number, decoded_ns in enumerate([30, 50, 20, 40]):
            stats.count(Slice(number, nothing, 0, 0.0, 0.0, decoded_ns, decoded_ns + 5))
    assert (spans["decode"][1], spans["resize"]) == (50, (20, 55))


async def test_a_busy_pool_and_a_short_video_are_not_split(
    queue: JobQueue, jobs: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    video = planned(DATA)
    async with queue.stream(counting(2)) as pieces:
        await anext(pieces)
        queue.inflight.size_bytes = 1  # keeps its worker until the second piece is read
        await segmented(queue, video)
    monkeypatch.setattr(segments, "_MIN_PX", 2**28)
    await segmented(queue, video)
    assert jobs == [(0, 30, 0), (0, 30, 0)]
