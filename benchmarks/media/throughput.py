"""Videos/s through preprocessing, four at once: against the same decoder in threads, and against one at a time.

Every video has 8 s of 1280×720 H.264 at 30 frames/s, of which 16 frames (2 per second) are sent, two per slice, each of
at most 768 tokens of 28×28 pixels. Ours is the service as a process; this process reads its streams. The other side is
the same planner, decoder and resizing in threads of this process, with the slices discarded: no worker process, no
copy, no gRPC. Both have one decoding thread or process per core, and FFmpeg's own threads in each.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc

from benchmarks.clips import RATE, another_path, clip
from benchmarks.media.frames import read_frames
from benchmarks.processes import cpu_s
from benchmarks.table import Row, Timings
from gridsieve.cli.launcher import LocalStack
from gridsieve.client.prompt import Video
from gridsieve.common.channels import open_channel
from gridsieve.common.checkpoint import DEMO_MODEL, Checkpoint
from gridsieve.common.contract.plan import Modality
from gridsieve.services.preprocessing.conversation import Conversation, MediaRequest
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.prompt.turns import Turn
from gridsieve.services.preprocessing.video.sampling import FrameSampling

VIDEOS = 4
FRAMES, MAX_PX = 16, 768 * 28 * 28
CORES = len(os.sched_getaffinity(0))
AT_LEAST_OF_THREADS, AT_LEAST_OF_IN_TURN = 0.95, 1.6


def throughput(rounds: int) -> list[Row]:
    """Every video has its own file; all are in the page cache."""
    with tempfile.TemporaryDirectory() as name:
        data = clip(8 * RATE, 720, 1280, keyframe_every=60)
        names = [another_path(Path(name), data) for _ in range(VIDEOS)]
        return asyncio.run(_throughput(rounds, Path(name), names))


async def _throughput(rounds: int, folder: Path, names: Sequence[str]) -> list[Row]:
    taken, cores_used = Timings(), Timings()
    flags = {"preprocessing": ["--decode-workers", str(CORES)]}
    videos = [Video(server_path=name, max_pixels=MAX_PX) for name in names]
    planner = Planner(Checkpoint(DEMO_MODEL), folder)
    async with LocalStack(services=("preprocessing",), media_root=folder, flags=flags) as stack:
        pid = stack.processes["preprocessing"].pid
        async with open_channel(stack.addresses["preprocessing"]) as channel:
            contenders = {
                "at once": partial(at_once, channel, videos),
                "in turn": partial(in_turn, channel, videos),
                "threads": partial(asyncio.to_thread, in_threads, planner, names),
            }
            for number in range(rounds + 1):
                sent = set()
                for name, contender in contenders.items():
                    start, cpu_start = time.perf_counter(), cpu_s(pid)
                    sent.add(await contender())
                    seconds = time.perf_counter() - start
                    if number:  # the first is a warm-up
                        taken.add(name, VIDEOS / seconds)
                        cores_used.add(name, (cpu_s(pid) - cpu_start) / seconds)
                assert len(sent) == 1, "the contenders sent different frames"
    used = {name: cores_used.median(name) for name in ("in turn", "at once")}
    note = (
        f"one after another keeps {used['in turn']:.2f} of {CORES} cores busy in preprocessing and its workers, "
        f"at once {used['at once']:.2f}"
    )
    what = f"{FRAMES} frames of 8 s of 720p, {VIDEOS} videos at once, videos per second"
    ours, turn, threads = (taken.median(name) for name in contenders)
    return [
        Row(what, "the same decoder in threads", ours, threads, "1/s", at_least=AT_LEAST_OF_THREADS),
        Row(what, "one after another", ours, turn, "1/s", at_least=AT_LEAST_OF_IN_TURN, note=note),
    ]


async def at_once(channel: grpc.aio.Channel, videos: Sequence[Video]) -> int:
    return sum(await asyncio.gather(*(read_frames(channel, video) for video in videos)))


async def in_turn(channel: grpc.aio.Channel, videos: Sequence[Video]) -> int:
    return sum([await read_frames(channel, video) for video in videos])


def in_threads(planner: Planner, names: Sequence[str]) -> int:
    with ThreadPoolExecutor(CORES) as threads:
        return sum(threads.map(partial(decoded_bytes, planner), names))


def decoded_bytes(planner: Planner, name: str) -> int:
    media = MediaRequest("video", Modality.VIDEO, name, FrameSampling(max_pixels=MAX_PX))
    planned = planner.plan(Conversation((Turn("user", (Modality.VIDEO,)),), (media,)))
    with planned.files:
        return sum(each.pixels.nbytes for each in planned.media[0].slices())
