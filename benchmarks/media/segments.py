"""Frames from all over a long video: on two idle workers side by side, against one."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from benchmarks.clips import clip, repeated
from benchmarks.table import Row, Timings
from gridsieve.services.preprocessing.settings import PreprocessingSettings
from gridsieve.services.preprocessing.sources.source import bytes_source
from gridsieve.services.preprocessing.video.packets import read_packets
from gridsieve.services.preprocessing.video.slices import PlannedVideo
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.jobs import VideoSlices
from gridsieve.services.preprocessing.workers.segments import slices_of

RATE, GROUP, LENGTH_S = 25, 250, 600
WANTED, SENT_PX = 120, (364, 644)
AT_MOST = 0.6
MOST_ROUNDS = 2  # of three minutes


def segments(rounds: int) -> list[Row]:
    source = bytes_source("video", repeated(clip(GROUP, 1080, 1920, GROUP, RATE), LENGTH_S * RATE // GROUP, RATE))
    index = read_packets(source)
    places = np.linspace(0, len(index.times.ticks) - 1, WANTED).round().astype(int).tolist()
    video = PlannedVideo(source, index, tuple(places), 2, SENT_PX)
    taken = asyncio.run(_measure(video, min(rounds, MOST_ROUNDS)))
    what = f"{WANTED} frames of {LENGTH_S // 60} minutes of 1080p, a keyframe every {GROUP // RATE} s, two workers"
    return [Row(what, "one worker", taken.median("2"), taken.median("1"), "s", at_most=AT_MOST)]


async def _measure(video: PlannedVideo, rounds: int) -> Timings:
    settings = PreprocessingSettings.load(["--model", "unused"])
    taken = Timings()
    for _ in range(rounds):
        for workers in (1, 2):
            async with JobQueue(workers, settings.limits, settings.inflight_bytes, print) as queue:
                start = time.perf_counter()
                async with slices_of(queue, VideoSlices(video)) as slices:
                    made = [each.first_frame async for each in slices]
                assert len(made) == WANTED // 2
                taken.add(str(workers), time.perf_counter() - start)
    return taken
