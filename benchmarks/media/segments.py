"""Frames of one video on several workers: on this machine's cores, and on those of a simulated pool.

The simulated pool's workers sleep for as long as decoding would take, so two cores can run 64 of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.clips import clip
from benchmarks.table import Row, Timings
from gridsieve.services.preprocessing.settings import PreprocessingSettings
from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.packets import read_packets
from gridsieve.services.preprocessing.video.slices import PlannedVideo
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.jobs import VideoSlices
from gridsieve.services.preprocessing.workers.segments import SegmentedDecoding

REAL, SIMULATED = "gridsieve.services.preprocessing.workers.worker", "benchmarks.media.sleeping_worker"
SENT_PX, SMALL_PX = (336, 588), (56, 56)
AT_MOST = 0.6
BURST_AT_MOST = 1.02
PAUSE_S = 0.1  # a client's next question does not come in the same turn of the loop
POOLS = (4, 8, 16, 64)


def segments(rounds: int) -> list[Row]:
    return asyncio.run(_on_cores(rounds))


def pool(rounds: int) -> list[Row]:
    return asyncio.run(_simulated(rounds))


async def _on_cores(rounds: int) -> list[Row]:
    rows = []
    for name, video in (
        ("16 s of 640×360, a keyframe every 60 frames", planned(480, (360, 640), 60, 32)),
        ("the same of 1280×720", planned(480, (720, 1280), 60, 32)),
        ("the same of 640×360 with one keyframe", planned(480, (360, 640), 480, 32)),
    ):
        taken = await measured(video, REAL, (1, 2), rounds)
        rows.append(Row(f"{name}, two workers", "one worker", taken.median("2"), taken.median("1"), "s", None, AT_MOST))
    return rows


async def _simulated(rounds: int) -> list[Row]:
    rows, video = [], planned(480, (360, 640), 60, 32, SMALL_PX)
    taken = await measured(video, SIMULATED, (1, *POOLS), rounds)
    for cores in POOLS:
        what = f"16 s of 640×360, {cores} simulated cores: one client"
        rows.append(Row(what, "one core", taken.median(str(cores)), taken.median("1"), "s"))
    for clients in (8, 32):
        divided, whole = await burst(video, clients, divided=True), await burst(video, clients, divided=False)
        what = f"16 simulated cores, {clients} clients at once, 96 clips: all"
        rows.append(Row(what, "a worker a clip", divided, whole, "s", None, BURST_AT_MOST))
    return rows


def planned(
    frames: int,
    size_px: tuple[int, int],
    keyframe_every: int,
    wanted: int,
    sent_px: tuple[int, int] = SENT_PX,
) -> PlannedVideo:
    source = bytes_source("video", clip(frames, *size_px, keyframe_every))
    index = read_packets(source)
    places = np.linspace(0, len(index.times.ticks) - 1, wanted).round().astype(int).tolist()
    return PlannedVideo(source, index, tuple(places), 2, sent_px)


async def measured(video: PlannedVideo, entry: str, pools: Sequence[int], rounds: int) -> Timings:
    """Seconds to make a video on pools of so many workers, each alone, by the number of workers."""
    taken = Timings()
    for workers in pools:
        async with queue_of(workers, entry) as queue:
            for _ in range(rounds):
                await asyncio.sleep(PAUSE_S)
                start = time.perf_counter()
                await made(SegmentedDecoding(queue), video)
                taken.add(str(workers), time.perf_counter() - start)
    return taken


async def burst(video: PlannedVideo, clients: int, divided: bool) -> float:
    """Seconds until clients, each of which asks for the next video when it has the last one, have 96."""
    async with queue_of(16, SIMULATED) as queue:
        decoding, left = SegmentedDecoding(queue), list(range(96))

        async def client() -> None:
            while left:
                left.pop()
                if divided:
                    await made(decoding, video)
                else:
                    async with queue.stream(VideoSlices(video)) as slices:
                        assert len([each async for each in slices]) == len(video.places) // 2

        start = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client())
        return time.perf_counter() - start


def queue_of(workers: int, entry: str) -> JobQueue:
    settings = PreprocessingSettings.load(["--model", "unused"])
    return JobQueue(workers, settings.limits, settings.inflight_bytes, print, entry)


async def made(decoding: SegmentedDecoding, video: PlannedVideo) -> None:
    async with decoding.slices_of(VideoSlices(video)) as slices:
        assert len([each async for each in slices]) == len(video.places) // 2
