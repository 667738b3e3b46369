"""How many cameras the machine watches in time, by NVIDIA's method for alerts of VLMs (VSS's "most RTSP streams").

Each camera is a real RTSP stream of its own film. Every 10 s of it are a chunk, about which the model is asked; it sees
the slices of these 10 s alone. A camera is in time while each alert is finished before the next chunk is over, and no
frame was dropped, so that no chunk is smaller than it says. The chunks of several cameras end one after the other.

    camera   |0 s ........ 10 s|.............. 20 s|
    slices    1 2 3 …        10 |11 12 …            |
    alert                        └─▶ answer          └─▶ answer       latency: from the last frame to the answer's end

The server, which plays encoded films, and the client run on the same cores. Every trial has services of its own,
because the encoder keeps what it has seen.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks.clips import write_repeated
from benchmarks.gpu.device import give_back
from benchmarks.live.camera import pictures, write_film
from benchmarks.live.rtsp import Cameras, playing
from benchmarks.live.session import QUESTION, Session
from benchmarks.models import QWEN2_5_VL_3B, SMALL
from benchmarks.processes import cpu_s
from benchmarks.table import Row
from gridsieve.cli.launcher import LocalStack
from gridsieve.common.channels import open_channel
from gridsieve.common.contract.retention import AUTO_THRESHOLD, EVS_CAUSAL, NONE, PIXEL_CHANGE
from gridsieve.common.security.credentials import NO_CREDENTIALS
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.generation_pb2 import STREAM_STATE_LOST, LiveAsk, LiveTrigger, Sampling
from gridsieve.v1.preprocessing_pb2 import WatchOpen, WatchRequest
from gridsieve.v1.preprocessing_pb2_grpc import PreprocessingServiceStub

CHUNK_S, CHUNKS = 10, 3
FPS = 2  # the model's
SLICES = CHUNK_S * FPS // 2
HEIGHT_PX, WIDTH_PX, CAMERA_FPS, BIT_RATE = 720, 1280, 25, 2_000_000
# A film is a piece over and over. A frame more than 10 s, so that each time other frames of it are shown.
PIECE_FRAMES = CHUNK_S * CAMERA_FPS + 1
PIECES = CHUNKS + 3
MOST = 128
TOKEN_PX = 28 * 28
ANSWER_ROOM, BLOCK_TOKENS = 192, 16
PRUNINGS = {
    "unpruned": prompt_pb2.Pruning(method=NONE),
    "EVS": prompt_pb2.Pruning(method=EVS_CAUSAL, rate=0.75),
    "pixel change": prompt_pb2.Pruning(method=PIXEL_CHANGE, threshold=AUTO_THRESHOLD),
}
WATCHED_S = 10


@dataclass(frozen=True, slots=True)
class Load:
    """tokens: of a chunk before pruning, about. pruning: of PRUNINGS. answer_tokens: of an alert."""

    tokens: int
    pruning: str
    answer_tokens: int

    def __str__(self) -> str:
        return f"{self.tokens:,} vision tokens in {CHUNK_S} s, {self.pruning}, {self.answer_tokens} tokens of output"

    @property
    def max_pixels(self) -> int:
        return self.tokens // SLICES * TOKEN_PX

    @property
    def window_tokens(self) -> int:
        """Enough that nothing is evicted but what is too old: beside a chunk the first slice, and a newer one."""
        return (SLICES + 2) * self.tokens // SLICES + 512


# On two cores, in minutes.
FEW = [
    *(Load(2_000, pruning, 1) for pruning in PRUNINGS),
    Load(2_000, "pixel change", 100),
    Load(8_000, "pixel change", 1),
]
ALL = [Load(tokens, pruning, answer) for tokens in (2_000, 4_000, 8_000) for pruning in PRUNINGS for answer in (1, 100)]


@dataclass(frozen=True, slots=True)
class Trial:
    """So many cameras at once.

    latencies_s: from the last frame of each chunk to its alert. failed: why; empty: all were in time. full, kept:
    tokens of a chunk before and after pruning, on average.
    """

    cameras: int
    latencies_s: Sequence[float]
    failed: str = ""
    full: float = 0
    kept: float = 0

    def __str__(self) -> str:
        if self.failed:
            return f"{self.cameras} cameras: {self.failed}"
        median_s, slow_s = self.latency_s
        return (
            f"{self.cameras} cameras in time: alerts after {median_s * 1e3:.0f} ms, 95 % within {slow_s * 1e3:.0f} ms, "
            f"{self.kept:.0f} of {self.full:.0f} tokens kept"
        )

    @property
    def latency_s(self) -> tuple[float, float]:
        """The median, and that of 95 %."""
        return statistics.median(self.latencies_s), statistics.quantiles(self.latencies_s, n=20)[-1]


class _TooLate(Exception):
    """A camera is not in time. The text says how."""


def streams(_: int) -> list[Row]:
    """Twice as many cameras until one is too late, then between; regardless of rounds."""
    return list(_rows(FEW))


def all_streams(_: int) -> list[Row]:
    """As `streams`, of every number of tokens, pruning and length of the answer."""
    return list(_rows(ALL))


def _rows(loads: Sequence[Load]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        films = _Films(Path(name))
        yield asyncio.run(_watched_alone(films))
        model, about = _model(Path(name) / "model")
        ours = 2
        for load in loads:
            print(load, file=sys.stderr)
            good, bad = _searched(model, films, load, max(1, ours))
            what = f"{about}: {load}"
            ours, theirs = good.cameras if good else 0, bad.cameras if bad else MOST
            note = "; ".join(map(str, filter(None, (good, bad))))
            against = "the next number, too late" if bad else "the most that are tried"
            yield Row(f"{what}: cameras in time", against, ours, theirs, "cameras", note=note)
            if good:
                yield Row(f"{what}: from the last frame to the alert", "95 % within", *good.latency_s, "s")


def _searched(model: Path, films: _Films, load: Load, count: int) -> tuple[Trial | None, Trial | None]:
    """The most cameras in time, and the next number that was tried; None: not even one, or MOST are in time.

    count: is tried first.
    """
    good: Trial | None = None
    bad: Trial | None = None
    low = 0
    while count <= MOST and (bad is None or bad.cameras - low > max(1, low // 16)):
        trial = asyncio.run(_tried(model, films, load, count))
        print(trial, file=sys.stderr)
        good, bad = (good, trial) if trial.failed else (trial, bad)
        low = good.cameras if good else 0
        count = (low + bad.cameras) // 2 if bad else 2 * low
    return good, bad


async def _tried(model: Path, films: _Films, load: Load, count: int) -> Trial:
    """Ends as soon as a camera is too late."""
    each = load.window_tokens + ANSWER_ROOM + BLOCK_TOKENS
    live, cache = (count + 1) * each, (count + 2) * each  # the warm-up's session may still have its tokens
    async with playing(films.of(count)) as cameras:
        flags = {
            "preprocessing": [*cameras.flags, "--max-streams", str(count)],
            "generation": ["--live-tokens", str(live), "--kv-cache-tokens", str(cache)],
        }
        async with LocalStack(model, flags=flags) as stack:
            trial, failed = _Trial(stack.address, cameras, load, count), ""
            try:
                await trial.run()
            except* _TooLate as late:
                failed = str(late.exceptions[0])
    chunks = trial.chunks or 1
    return Trial(count, trial.latencies_s, failed, trial.full / chunks, trial.kept / chunks)


class _Trial:
    """Cameras that are watched until each had its alerts. full, kept: tokens of all their chunks."""

    def __init__(self, address: str, cameras: Cameras, load: Load, count: int) -> None:
        self._address, self._cameras, self._load, self._count = address, cameras, load, count
        self._left, self._done = count, asyncio.Event()
        self.latencies_s: list[float] = []
        self.full = self.kept = self.chunks = 0

    async def run(self) -> None:
        """Raises a group of _TooLate."""
        async with open_channel(self._address, NO_CREDENTIALS) as channel:
            opened: dict[str, Any] = {
                "fps": FPS,
                "max_pixels": self._load.max_pixels,
                "pruning": PRUNINGS[self._load.pruning],
                "window_s": CHUNK_S - 1 / FPS,
                "window_tokens": self._load.window_tokens,
                "answer_tokens": ANSWER_ROOM,
            }
            async with Session.opened(channel, **opened) as session:  # a warm-up
                frames = pictures(MOST, 0, 4, HEIGHT_PX, WIDTH_PX)
                await session.watch(frames, [place / FPS for place in range(len(frames))])
                await session.ask(self._load.answer_tokens, transient=True)
                await session.until("finished")
            sampling = Sampling(max_new_tokens=self._load.answer_tokens, temperature=0, ignore_eos=True)
            ask = LiveAsk(parts=[prompt_pb2.Part(text=QUESTION)], sampling=sampling, transient=True)
            opened["triggers"] = [LiveTrigger(ask=ask, every_s=CHUNK_S)]
            async with asyncio.TaskGroup() as group:
                watching = [group.create_task(self._watch(channel, place, opened)) for place in range(self._count)]
                await self._done.wait()
                for each in watching:
                    each.cancel()

    async def _watch(self, channel: grpc.aio.Channel, place: int, opened: Mapping[str, Any]) -> None:
        await asyncio.sleep(place / self._count * CHUNK_S)
        async with Session.opened(channel, source=self._cameras.url(place), **opened) as session:
            last_s, alerts = 0.0, 0
            while True:
                try:
                    async with asyncio.timeout(2 * CHUNK_S):
                        response = await session.read()
                except TimeoutError:
                    raise _TooLate(f"nothing for {2 * CHUNK_S} s") from None
                assert response is not None, "the session ended"
                if session.dropped:
                    raise _TooLate(f"{session.dropped} frames of a camera dropped, {last_s:.0f} s after its first one")
                assert response.stream.state != STREAM_STATE_LOST, response.stream.reason
                if response.HasField("slice"):
                    last_s = response.slice.last_time_s
                if not response.HasField("finished"):
                    continue
                assert not response.finished.error, response.finished.error
                took_s = time.time() - self._cameras.began_s[place][-1] - last_s
                if took_s > CHUNK_S:
                    raise _TooLate(f"an alert {took_s:.1f} s after the last frame of its chunk")
                self.latencies_s.append(took_s)
                alerts += 1
                if alerts == CHUNKS:
                    self.full += session.usage.media_tokens_full
                    self.kept += session.usage.media_tokens
                    self.chunks += CHUNKS
                    self._left -= 1
                    if not self._left:
                        self._done.set()


class _Films:
    """A film for each camera, made when it is needed first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: list[Path] = []

    def of(self, count: int) -> Sequence[Path]:
        with ProcessPoolExecutor() as pool:
            self._made += pool.map(_film, range(len(self._made), count), [self._folder] * count)
        return self._made[:count]


def _film(camera: int, folder: Path) -> Path:
    piece, film = folder / f"piece-{camera}.mp4", folder / f"{camera}.mp4"
    write_film(piece, camera, PIECE_FRAMES, CAMERA_FPS, HEIGHT_PX, WIDTH_PX, BIT_RATE)
    write_repeated(film, piece.read_bytes(), PIECES, CAMERA_FPS)
    return film


def _model(folder: Path) -> tuple[Path, str]:
    """A checkpoint of random weights, and what it is."""
    if torch.cuda.is_available():
        device = torch.device("cuda")
        whole = QWEN2_5_VL_3B.drawn(device, torch.bfloat16)
        path, name = QWEN2_5_VL_3B.save(whole, folder), "Qwen2.5-VL's 3B"
        del whole
        give_back(device)
        return path, name
    return SMALL.save(SMALL.drawn(), folder), "60 M"


async def _watched_alone(films: _Films) -> Row:
    """What preprocessing takes for one camera: to decode all of it, and to send the frames that are shown."""
    async with playing(films.of(1)) as cameras:
        stack = LocalStack(services=("preprocessing",), flags={"preprocessing": cameras.flags})
        async with stack, open_channel(stack.addresses["preprocessing"], NO_CREDENTIALS) as channel:
            call = PreprocessingServiceStub(channel).Watch()
            await call.write(WatchRequest(open=WatchOpen(fps=FPS, url=cameras.url(0))))
            service, from_s, used_s = stack.processes["preprocessing"].pid, 0.0, 0.0
            async for response in call:
                time_s = response.frame.time_s
                if not from_s and time_s > 1:
                    from_s, used_s = time_s, cpu_s(service)
                if from_s and time_s > from_s + WATCHED_S:
                    cores = (cpu_s(service) - used_s) / (time_s - from_s)
                    break
            call.cancel()
    what = (
        f"preprocessing watches one camera of {WIDTH_PX}×{HEIGHT_PX} pixels, {CAMERA_FPS} frames a second, H.264 of "
        f"{BIT_RATE / 1e6:g} Mbit/s, and sends {FPS} frames a second: processor seconds a second"
    )
    return Row(what, "all cores", cores, os.cpu_count() or 1, "cores")
