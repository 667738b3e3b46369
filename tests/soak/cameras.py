"""The cameras of the live soak: RTSP streams that are watched to their ends, with an account of every frame.

sent        all frames of a film, by its length
due         the first of each interval of 1 / FPS; the others are not due
due         = came = shown + dropped, by the session's own sums, and by the times of the slices
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from benchmarks.clips import write_repeated
from benchmarks.live.camera import write_film
from benchmarks.live.rtsp import Cameras, playing
from benchmarks.live.session import QUESTION, Session
from benchmarks.processes import cpu_s, proportional_bytes
from gridsieve.common.channels import open_channel
from gridsieve.common.security.credentials import NO_CREDENTIALS
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.generation_pb2 import LiveAsk, LiveClose, LiveTrigger, Sampling, StreamState
from tests.integration.fleet import Stack

HEIGHT_PX, WIDTH_PX, CAMERA_FPS, BIT_RATE = 240, 320, 5, 50_000
FPS = 1
MINUTE_S = 60
# A film is a piece over and over. A frame more than a minute, so that the next time other frames of it are shown.
PIECE_FRAMES = MINUTE_S * CAMERA_FPS + 1
ANSWER_TOKENS = 4
WINDOW = {"fps": FPS, "window_tokens": 1024, "answer_tokens": 128}
SAMPLED_EVERY_S = 10.0
LATE_S = 10.0
END_S = 120.0
EARLY_MINUTE = 5
AT_MOST = 1.05
LAST = "last"


@dataclass(slots=True)
class Watched:
    """What came of one camera.

    times_s: of the frames that were shown. late_s: from when a frame was due until its slice was added, at most.
    states: how often its stream was in each, but for playing.
    """

    times_s: set[float] = field(default_factory=set)
    late_s: float = 0.0
    answers: int = 0
    came: int = 0
    shown: int = 0
    dropped: int = 0
    states: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sample:
    """Memory and processor seconds so far, by service with its workers. now_s: since the beginning."""

    now_s: float
    bytes: Mapping[str, int]
    cpu_s: Mapping[str, float]

    @property
    def minute(self) -> int:
        """Counted from 1."""
        return int(self.now_s // MINUTE_S) + 1


@dataclass(frozen=True, slots=True)
class Used:
    """By a service with its workers. early_bytes, late_bytes: median memory in an early and in the last minute.
    hourly_bytes: its growth between them, of a straight line. cores: mean processor seconds a second."""

    early_bytes: float
    late_bytes: float
    hourly_bytes: float
    cores: float

    @property
    def ratio(self) -> float:
        return self.late_bytes / self.early_bytes


@dataclass(frozen=True, slots=True)
class Report:
    """Sums over all cameras. sent, due, came, shown, dropped: frames. late_s: the latest of all slices.

    early: the minute with which memory is compared. used: by service.
    """

    cameras: int
    minutes: int
    sent: int
    due: int
    came: int
    shown: int
    dropped: int
    answers: int
    late_s: float
    early: int
    used: dict[str, Used]
    faults: list[str]


@asynccontextmanager
async def filming(count: int, minutes: int) -> AsyncIterator[Cameras]:
    """So many cameras, each with a film of its own of so many minutes."""
    with TemporaryDirectory(prefix="gridsieve-") as folder:
        films = [Path(folder) / f"{number}.mp4" for number in range(count)]
        for number, film in enumerate(films):
            piece = film.with_suffix(".piece.mp4")
            write_film(piece, number, PIECE_FRAMES, CAMERA_FPS, HEIGHT_PX, WIDTH_PX, BIT_RATE)
            write_repeated(film, piece.read_bytes(), minutes, CAMERA_FPS)
        async with playing(films) as cameras:
            yield cameras


async def watch(stack: Stack, cameras: Cameras, count: int, minutes: int) -> Report:
    """Watches all cameras to the ends of their films."""
    logged = {name: len(stack.log(name)) for name in stack.services}
    all_watched, samples = [Watched() for _ in range(count)], list[Sample]()
    sampling = asyncio.create_task(_sample(stack, samples))
    try:
        async with open_channel(stack.address, NO_CREDENTIALS) as channel, asyncio.TaskGroup() as group:
            for number, watched in enumerate(all_watched):
                group.create_task(_watch(channel, cameras, number, watched, minutes))
    finally:
        sampling.cancel()
    faults = [fault for number, each in enumerate(all_watched) for fault in _faults(number, each, minutes)]
    for name in stack.services:
        faults += [f"{name} logged {line}" for line in stack.log(name)[logged[name] :].splitlines() if _is_wrong(line)]
    return _reported(all_watched, samples, minutes, faults)


async def _watch(channel: grpc.aio.Channel, cameras: Cameras, number: int, watched: Watched, minutes: int) -> None:
    ask = LiveAsk(
        parts=[prompt_pb2.Part(text=QUESTION)],
        sampling=Sampling(max_new_tokens=ANSWER_TOKENS, temperature=0),
        transient=True,
    )
    opened = {**WINDOW, "source": cameras.url(number), "triggers": [LiveTrigger(ask=ask, on_change=0.3)]}
    try:
        async with asyncio.timeout(minutes * MINUTE_S + END_S), Session.opened(channel, **opened) as session:
            while response := await session.read():
                match response.WhichOneof("response"):
                    case "slice":
                        watched.times_s |= {response.slice.first_time_s, response.slice.last_time_s}
                        due_s = cameras.began_s[number][-1] + response.slice.last_time_s
                        watched.late_s = max(watched.late_s, time.time() - due_s)
                    case "stream":
                        state = StreamState.Name(response.stream.state).removeprefix("STREAM_STATE_").lower()
                        if state != "playing":
                            watched.states[state] += 1
                        if state == "ended":  # what waits is shown before a question
                            ask.ask_id = LAST
                            await session.send(ask=ask)
                    case "finished":
                        watched.answers += 1
                        if response.finished.error:
                            watched.faults.append(f"an answer failed: {response.finished.error}")
                        if response.finished.ask_id == LAST:
                            await session.send(close=LiveClose())
                watched.came, watched.shown = session.usage.frames, session.usage.used_frames
                watched.dropped = session.dropped
    except (TimeoutError, grpc.aio.AioRpcError) as error:
        watched.faults.append(f"the session failed: {error!r}")


async def _sample(stack: Stack, samples: list[Sample]) -> None:
    """Until it is cancelled."""
    began_s, pids = time.monotonic(), {name: service.pid for name, service in stack.services.items()}
    while True:
        now_s = time.monotonic() - began_s
        found = await asyncio.to_thread(lambda: {name: proportional_bytes(pid) for name, pid in pids.items()})
        samples.append(Sample(now_s, found, {name: cpu_s(pid) for name, pid in pids.items()}))
        await asyncio.sleep(SAMPLED_EVERY_S - now_s % SAMPLED_EVERY_S)


def _faults(number: int, watched: Watched, minutes: int) -> Iterator[str]:
    due = _due(minutes)
    accounts = {
        "came": watched.came,
        "shown and dropped": watched.shown + watched.dropped,
        "shown by the times of slices, and dropped": len(watched.times_s) + watched.dropped,
    }
    found = [f"{frames} frames {what}, {due} were due" for what, frames in accounts.items() if frames != due]
    if watched.states != {"ended": 1}:
        found.append(f"its stream was {dict(watched.states)}")
    if watched.late_s > LATE_S:
        found.append(f"a slice was added {watched.late_s:.1f} s after its last frame")
    return (f"camera {number}: {fault}" for fault in found + watched.faults)


def _due(minutes: int) -> int:
    """Frames of a camera that are the first of their interval. FFmpeg gives no time to the first frame of a film by
    RTP, which is not shown: intervals count from the second one."""
    return (minutes * PIECE_FRAMES - 2) * FPS // CAMERA_FPS + 1


def _reported(all_watched: Sequence[Watched], samples: Sequence[Sample], minutes: int, faults: Sequence[str]) -> Report:
    count, early = len(all_watched), min(EARLY_MINUTE, max(1, minutes - 1))
    memory = {}
    for name in samples[0].bytes:
        early_bytes, late_bytes = (
            statistics.median(each.bytes[name] for each in samples if each.minute == minute)
            for minute in (early, minutes)
        )
        steady = [each for each in samples if early <= each.minute <= minutes]
        sizes, times_s = [each.bytes[name] for each in steady], [each.now_s for each in steady]
        hourly_bytes = statistics.linear_regression(times_s, sizes).slope * 3600
        cores = (steady[-1].cpu_s[name] - steady[0].cpu_s[name]) / (times_s[-1] - times_s[0])
        memory[name] = Used(early_bytes, late_bytes, hourly_bytes, cores)
    faults = [
        *faults,
        *(f"{name} grew {each.ratio:.3f} times" for name, each in memory.items() if each.ratio > AT_MOST),
    ]
    came, shown, dropped, answers = (_sum(all_watched, each) for each in ("came", "shown", "dropped", "answers"))
    late_s = max(each.late_s for each in all_watched)
    sent, due = count * minutes * PIECE_FRAMES, count * _due(minutes)
    return Report(count, minutes, sent, due, came, shown, dropped, answers, late_s, early, memory, faults)


def _sum(all_watched: Sequence[Watched], name: str) -> int:
    return sum(getattr(each, name) for each in all_watched)


def _is_wrong(line: str) -> bool:
    return any(word in line for word in ('"level": "warning"', '"level": "error"', '"level": "critical"', "Traceback"))
