"""What a slice of a live session costs while nothing changes, against one in which everything does.

A camera's pictures of 640×480, as JPEG, through three services. Each scene is shown by a slice that changes all of it,
then by slices of the same bytes, then by slices whose pictures are other ones of the scene: another noise each.
"""

from __future__ import annotations

import asyncio
import io
import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.live.camera import FPS
from benchmarks.live.session import Session
from benchmarks.models import SMALL, SMALL_QWEN3_VL, Layout
from benchmarks.processes import cpu_s
from benchmarks.table import Row, Timings
from gridsieve.cli.launcher import LocalStack
from gridsieve.common.channels import open_channel
from gridsieve.common.security.credentials import NO_CREDENTIALS
from gridsieve.v1.generation_pb2 import LiveFrame

HEIGHT_PX, WIDTH_PX = 480, 640
# Levels, the standard deviation of a pixel.
NOISE = 3.0
# Slices of the same bytes, and of other bytes, after each one that changes.
STILL_SLICES = 4
AT_MOST = 0.05
FLAGS = {"generation": ["--live-tokens", "8192"]}

# With the pixels of four frames, of which a slice has two.
_SHORT = replace(SMALL_QWEN3_VL, shape=replace(SMALL_QWEN3_VL.shape, max_pixels=4 * SMALL.shape.max_pixels))
MODELS: Mapping[str, Layout] = {"Qwen2.5-VL's layout": SMALL, "Qwen3-VL's layout": _SHORT}


def still_slice(rounds: int) -> list[Row]:
    """Seconds from a slice's second frame to its event, medians; a round is a scene."""
    return [row for name, layout in MODELS.items() for row in asyncio.run(_rows(name, layout, rounds))]


async def _rows(name: str, layout: Layout, rounds: int) -> list[Row]:
    taken, used_s = Timings(), defaultdict[str, float](float)
    with tempfile.TemporaryDirectory() as folder:
        model = layout.save(layout.drawn(), Path(folder))
        async with LocalStack(model, flags=FLAGS) as stack, _watching(stack.address) as watching:
            pids = [process.pid for process in stack.processes.values()]
            for scene in range(rounds + 1):
                pictures = [_picture(scene, number) for number in range(2 + 2 * STILL_SLICES)]
                others = [pictures[first : first + 2] for first in range(0, len(pictures), 2)]
                shown = {
                    "changed": others[:1],
                    "equal bytes": [[pictures[1]] * 2] * (STILL_SLICES + 1),
                    "other bytes": others[1:],
                }
                for kind, slices in shown.items():
                    before_s = sum(map(cpu_s, pids))
                    for number, pair in enumerate(slices):
                        took_s, kept, tokens = await watching.show(*pair)
                        assert kept >= 0.9 * tokens if kind == "changed" else kept == 0, (kind, kept, tokens)
                        # The first scene is a warm-up. The first slice of equal bytes has other ones before it.
                        if scene and (kind != "equal bytes" or number):
                            taken.add(kind, took_s)
                    if scene:
                        used_s[kind] += (sum(map(cpu_s, pids)) - before_s) / len(slices)
    note = "mean processor time of all services, in ms a slice: " + ", ".join(
        f"{kind} {total_s / rounds * 1e3:.0f}" for kind, total_s in used_s.items()
    )
    changed_s = taken.median("changed")
    what = f"60 M, {name}, {WIDTH_PX}×{HEIGHT_PX}: a slice in which nothing changes"
    return [
        Row(f"{what}, {kind}", "one that changes", taken.median(kind), changed_s, "s", at_most=AT_MOST, note=note)
        for kind in ("equal bytes", "other bytes")
    ]


@asynccontextmanager
async def _watching(address: str) -> AsyncIterator[_Watching]:
    async with open_channel(address, NO_CREDENTIALS) as channel, Session.opened(channel) as session:
        yield _Watching(session)


class _Watching:
    """A live session that is shown two frames a second."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._times_s = itertools.count(0, 1 / FPS)

    async def show(self, first: bytes, last: bytes) -> tuple[float, int, int]:
        """Seconds from the second frame to the slice; how many tokens it keeps, and has."""
        await self._session.send(frame=LiveFrame(picture=first, time_s=next(self._times_s)))
        start = time.perf_counter()
        await self._session.send(frame=LiveFrame(picture=last, time_s=next(self._times_s)))
        while (response := await self._session.read()) is not None:
            if response.HasField("slice"):
                made = response.slice
                return time.perf_counter() - start, made.kept.shape[0], made.grid.h * made.grid.w
        raise AssertionError("the session ended before the slice")


def _picture(scene: int, number: int) -> bytes:
    """A JPEG of a scene: squares of 32 pixels of its own colours, and the noise of one picture."""
    squares = np.random.default_rng(scene).integers(30, 226, (HEIGHT_PX // 32, WIDTH_PX // 32, 3))
    noise = np.random.default_rng((scene, number)).normal(0, NOISE, (HEIGHT_PX, WIDTH_PX, 1))
    levels = squares.repeat(32, 0).repeat(32, 1) + noise
    file = io.BytesIO()
    Image.fromarray(levels.round().clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()
