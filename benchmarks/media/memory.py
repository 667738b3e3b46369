"""Resident memory of the three services over 200 requests of mixed size, four at a time.

A service's memory includes its worker processes. The caches are small enough to be full when measuring begins: the
encoder's cache (CACHE_BYTES) and the KV cache (KV_TOKENS), whose blocks are kept until they are needed again. Every
second request repeats the media of an earlier one.
"""

from __future__ import annotations

import asyncio
import io
import statistics
from collections.abc import Iterator, Sequence
from itertools import islice
from random import Random

import numpy as np
from PIL import Image as Picture

from benchmarks.clips import RATE, another_file, clip, scene_clip
from benchmarks.processes import resident_bytes
from benchmarks.table import Row
from gridsieve.cli.launcher import SERVICES, LocalStack
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Image, PartLike, Video
from gridsieve.common.contract.retention import EVS

REQUESTS, WARM_UP, AT_ONCE = 200, 50, 4
SETTLING_S = 0.1  # a worker frees memory after it has reported its result
CACHE_BYTES, KV_TOKENS = 4 * 2**20, 4096
AT_MOST = 1.05


def memory(_: int) -> list[Row]:
    """One run, regardless of rounds: medians of the last 50 requests against those after the warm-up."""
    samples = asyncio.run(_memory())
    return [_row(service, samples[service]) for service in SERVICES]


def _row(service: str, bytes_by_request: Sequence[int]) -> Row:
    before, after = early_and_late(bytes_by_request)
    note = f"{min(bytes_by_request) >> 20} to {max(bytes_by_request) >> 20} MiB over all requests"
    what = f"memory of {service}, the last {WARM_UP} of {REQUESTS} requests"
    against = f"requests {WARM_UP} to {2 * WARM_UP}"
    return Row(what, against, after, before, "bytes", at_most=AT_MOST, note=note)


def early_and_late(samples: Sequence[int]) -> tuple[float, float]:
    """Medians of the samples right after the warm-up and of the last ones, as many as the warm-up has."""
    return statistics.median(samples[WARM_UP : 2 * WARM_UP]), statistics.median(samples[-WARM_UP:])


async def _memory() -> dict[str, list[int]]:
    """Bytes by service, sampled whenever the four concurrent requests have ended."""
    flags = {
        "encoder": ["--cache-bytes", str(CACHE_BYTES)],
        "generation": ["--kv-cache-tokens", str(KV_TOKENS)],
    }
    found: dict[str, list[int]] = {service: [] for service in SERVICES}
    waiting = requests()
    async with LocalStack(flags=flags) as stack, GridsieveClient(stack.address) as client:
        while wave := list(islice(waiting, AT_ONCE)):
            await asyncio.gather(*(_ask(client, media, rate) for media, rate in wave))
            await asyncio.sleep(SETTLING_S)
            for service, process in stack.processes.items():
                found[service] += [resident_bytes(process.pid)] * len(wave)
    return found


async def _ask(client: GridsieveClient, media: PartLike, rate: float) -> None:
    await client.ask(media, "What happens?", pruning_rate=rate, pruning_method=EVS, max_new_tokens=4, temperature=0)


def requests() -> Iterator[tuple[PartLike, float]]:
    """Media and pruning rates: the demo's clips, 720p clips, pictures; every second request repeats an earlier one."""
    random = Random(0)
    large = clip(3 * RATE, 720, 1280, keyframe_every=60)
    seen: list[PartLike] = []
    for number in range(REQUESTS):
        media = random.choice(seen) if number % 2 else _new_media(number, random, large)
        seen.append(media)
        yield media, random.choice((0.0, 0.5, 0.75, 0.9))


def _new_media(number: int, random: Random, large: bytes) -> PartLike:
    kind = random.choice(("demo", "demo", "large", "picture"))
    if kind == "picture":
        return Image(data=_picture(random), max_pixels=random.choice((112, 224, 448)) ** 2)
    if kind == "large":
        side_px = random.choice((112, 224, 336))
        return Video(data=another_file(large), fps=random.choice((1.0, 2.0)), max_pixels=side_px**2)
    return Video(data=scene_clip(number))


def _picture(random: Random) -> bytes:
    """A PNG of noise, of random size."""
    shape = (random.randrange(200, 1200), random.randrange(200, 1200), 3)
    pixels = np.random.default_rng(random.getrandbits(32)).integers(0, 256, shape, np.uint8)
    file = io.BytesIO()
    Picture.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
