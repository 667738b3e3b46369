"""Short videos through preprocessing and encoder: concurrent, so that slices share forwards, against sequential."""

from __future__ import annotations

import asyncio
import time

from benchmarks.clips import scene_clip
from benchmarks.table import Row, Timings
from gridsieve.cli.launcher import LocalStack
from gridsieve.client.encoding import encode
from gridsieve.client.prompt import Video

VIDEOS = 8
AT_LEAST = 1.5


def sharing(rounds: int) -> list[Row]:
    """Videos/s on the demo's tower; the cache is off, and every video is different."""
    return [asyncio.run(_sharing(rounds))]


async def _sharing(rounds: int) -> Row:
    taken = Timings()
    flags = {"encoder": ["--cache-bytes", "0"]}
    async with LocalStack(services=("preprocessing", "encoder"), flags=flags) as stack:
        address = stack.addresses["encoder"]
        for number in range(rounds + 1):
            videos = [Video(data=scene_clip(number * VIDEOS + each)) for each in range(VIDEOS)]
            start = time.perf_counter()
            for video in videos:
                await encode(address, video)
            middle = time.perf_counter()
            await asyncio.gather(*(encode(address, video) for video in videos))
            end = time.perf_counter()
            if number:  # the first is a warm-up
                taken.add("at once", VIDEOS / (end - middle))
                taken.add("in turn", VIDEOS / (middle - start))
    what = f"{VIDEOS} of the demo's clips encoded at once, videos per second"
    return Row(what, "one after another", taken.median("at once"), taken.median("in turn"), "1/s", at_least=AT_LEAST)
