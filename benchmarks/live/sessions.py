"""How many live sessions the machine watches at once, with the demo's model, without dropping a frame.

Frames are sent in real time, two a second, by cameras that are not in step. The client, whose pictures are encoded
before, runs on the same cores.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from benchmarks.live.camera import FPS, pictures
from benchmarks.live.session import Session
from benchmarks.table import Row
from gridsieve.cli.launcher import LocalStack
from gridsieve.common.channels import open_channel
from gridsieve.common.security.credentials import NO_CREDENTIALS
from gridsieve.v1.generation_pb2 import LiveClose, LiveFrame

SIDE_PX = 112
SECONDS = 20
FIRST, MOST = 8, 256
WANTED = {"fps": FPS, "window_tokens": 512, "answer_tokens": 128}
ROOM = MOST * 640
FLAGS = {"generation": ["--kv-cache-tokens", str(ROOM + 8192), "--live-tokens", str(ROOM)]}


@dataclass(frozen=True, slots=True)
class Trial:
    """So many sessions at once.

    after_s: from when a slice's second frame was due until the slice is added. late_s: by which frames were sent late,
    at most.
    """

    sessions: int
    dropped: int
    after_s: Sequence[float]
    late_s: float

    def __str__(self) -> str:
        median_s, slow_s = statistics.median(self.after_s), statistics.quantiles(self.after_s, n=20)[-1]
        return (
            f"{self.sessions} sessions: {self.dropped} frames dropped, a slice is added {median_s * 1e3:.0f} ms after "
            f"its second frame is due, 95 % of them within {slow_s * 1e3:.0f} ms, frames sent up to "
            f"{self.late_s * 1e3:.0f} ms late"
        )


def sessions(_: int) -> list[Row]:
    """Twice as many until frames are dropped, then between; regardless of rounds."""
    good, bad = asyncio.run(_sessions())
    note = f"{SECONDS} s each; {good}; {bad}"
    what = f"sessions at once without a dropped frame, demo's model, {SIDE_PX} × {SIDE_PX} pixels, 2 frames a second"
    return [Row(what, "the next number, with drops", good.sessions, bad.sessions, "sessions", note=note)]


async def _sessions() -> tuple[Trial, Trial]:
    """The most sessions without drops, and the next number that was tried."""
    async with LocalStack(flags=FLAGS) as stack:
        good, trial = None, await _tried(stack.address, FIRST)
        while not trial.dropped:
            assert 2 * trial.sessions <= MOST, "raise MOST"
            good, trial = trial, await _tried(stack.address, 2 * trial.sessions)
        assert good is not None, "frames were dropped at once"
        bad = trial
        while bad.sessions - good.sessions > max(1, good.sessions // 16):
            trial = await _tried(stack.address, (good.sessions + bad.sessions) // 2)
            good, bad = (good, trial) if trial.dropped else (trial, bad)
        return good, bad


async def _tried(address: str, count: int) -> Trial:
    # Cameras of no other trial: the encoder keeps what it has seen.
    cameras = range(count * MOST, count * MOST + count)
    frames = [pictures(camera, 0, SECONDS * FPS, SIDE_PX, SIDE_PX) for camera in cameras]
    ready = asyncio.Barrier(count)
    async with open_channel(address, NO_CREDENTIALS) as channel:
        watched = [_watched(channel, ready, each, place / count / FPS) for place, each in enumerate(frames)]
        found = await asyncio.gather(*watched)
    dropped, after_s, late_s = zip(*found, strict=True)
    trial = Trial(count, sum(dropped), [each for session in after_s for each in session], max(late_s))
    print(trial, file=sys.stderr)
    return trial


async def _watched(
    channel: grpc.aio.Channel, ready: asyncio.Barrier, frames: Sequence[bytes], behind_s: float
) -> tuple[int, list[float], float]:
    """How many frames a session dropped, how long each slice took, and how late a frame was sent, at most.

    behind_s: of the first session's frames.
    """
    due_s: dict[float, float] = {}
    after_s: list[float] = []

    async def send() -> float:
        await ready.wait()
        begun_s, late_s = time.perf_counter() + behind_s, 0.0
        for number, picture in enumerate(frames):
            due_s[number / FPS] = begun_s + number / FPS
            await asyncio.sleep(due_s[number / FPS] - time.perf_counter())
            await session.send(frame=LiveFrame(picture=picture, time_s=number / FPS))
            late_s = max(late_s, time.perf_counter() - due_s[number / FPS])
        await session.send(close=LiveClose())
        return late_s

    async with Session.opened(channel, **WANTED) as session:
        sending = asyncio.create_task(send())
        while response := await session.read():
            if response.HasField("slice"):
                after_s.append(time.perf_counter() - due_s[response.slice.last_time_s])
        return session.dropped, after_s, await sending
