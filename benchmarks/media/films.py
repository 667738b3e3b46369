"""Time to first token of a question about a film of two hours, and about a recorded screen, named by their paths."""

from __future__ import annotations

import asyncio
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from benchmarks.ask import ask
from benchmarks.clips import another_path, clip, write_repeated
from benchmarks.table import Row, Timings
from gridsieve.cli.launcher import LocalStack
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Video

FILM_FPS, FILM_GROUP, FILM_S, FILM_BIT_RATE = 24, 250, 7200, 4_000_000
SCREEN_FPS, SCREEN_S, SCREEN_PX, CHANGES = 15, 300, (720, 1280), 10
SCREEN_FRAMES = 600
# A file that has just been written is hashed again: see `gridsieve.services.preprocessing.sources.digests`.
SETTLED_S = 2.5
SECOND_AT_MOST, SCREEN_AT_MOST = 0.05, 0.15
MOST_ROUNDS = 2  # of four minutes


def films(rounds: int) -> list[Row]:
    return asyncio.run(_films(min(rounds, MOST_ROUNDS)))


async def _films(rounds: int) -> list[Row]:
    """By the embedded model, whose tower weighs little; the encoder's cache holds the whole film."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "film.mp4"
        group = clip(FILM_GROUP, 1080, 1920, FILM_GROUP, FILM_FPS, bit_rate=FILM_BIT_RATE)
        write_repeated(path, group, FILM_S * FILM_FPS // FILM_GROUP, FILM_FPS)
        await asyncio.sleep(SETTLED_S)
        # Services of its own, which have read nothing of the film either.
        async with LocalStack(media_root=folder) as stack, GridsieveClient(stack.address) as client:
            by_keyframes, _ = await ask(
                client, Video(server_path=path.name, mode="keyframes"), "What happens in the video?", max_new_tokens=2
            )
        async with LocalStack(media_root=folder) as stack, GridsieveClient(stack.address) as client:
            second = await _film(client, path)
            what = "two hours of 1080p, H.264, a keyframe every 250 frames: first token by keyframes"
            keyframes = Row(what, "uniform", by_keyframes.first_token_s, second.theirs, "s")
            return [second, keyframes, *await _screen(client, folder, rounds)]


async def _film(client: GridsieveClient, path: Path) -> Row:
    """One run, regardless of rounds."""
    size_bytes, film = path.stat().st_size, Video(server_path=path.name)
    first, answered = await ask(client, film, "What happens in the video?", max_new_tokens=2)
    second, _ = await ask(client, film, "Which shape moves?", pruning_rate=0.75, max_new_tokens=2)
    stages = ", ".join(f"{stage} {stage_s:.2f}" for stage, stage_s in answered.timings.stages_s.items())
    note = f"{size_bytes / 1e6:.0f} MB, {2 * answered.usage.media[0].grid.t} frames; stages of the first in s: {stages}"
    what = "two hours of 1080p, H.264, a keyframe every 250 frames: first token of a second question at rate 0.75"
    return Row(what, "the first, unpruned", second.first_token_s, first.first_token_s, "s", None, SECOND_AT_MOST, note)


async def _screen(client: GridsieveClient, folder: Path, rounds: int) -> list[Row]:
    data, taken = recorded_screen(), Timings()
    for _ in range(rounds + 1):
        for mode, rate in (("uniform", 0.0), ("uniform", 0.9), ("keyframes", 0.0)):
            video = Video(server_path=another_path(folder, data), num_frames=SCREEN_FRAMES, mode=mode)
            await asyncio.sleep(SETTLED_S)
            asked, _ = await ask(
                client,
                video,
                "What happens?",
                pruning_rate=rate,
                pruning_method="pixel_change",
                max_new_tokens=2,
            )
            taken.add(f"{mode} {rate:g}", asked.first_token_s)
    what = "five minutes of a recorded screen, 720p, ten changes, 600 frames"
    unpruned = taken.median("uniform 0")
    return [
        Row(f"{what}, {how}: first token", "unpruned", taken.median(ours), unpruned, "s", at_most=SCREEN_AT_MOST)
        for how, ours in (("0.9 by pixel_change", "uniform 0.9"), ("by keyframes", "keyframes 0"))
    ]


def recorded_screen() -> bytes:
    """An mp4 file of H.264 by x264's defaults."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=SCREEN_FPS)
        stream.height, stream.width, stream.pix_fmt = *SCREEN_PX, "yuv420p"
        for screen in _screens():
            frame = av.VideoFrame.from_ndarray(screen, format="rgb24")
            for _ in range(SCREEN_FPS * SCREEN_S // (CHANGES + 1)):
                frame.pts = None
                container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def _screens() -> Iterator[NDArray[np.uint8]]:
    """Windows with lines of dark marks, as of a text, each at another place over those before it."""
    random = np.random.default_rng(0)
    height, width = SCREEN_PX
    screen = np.full((height, width, 3), 235, np.uint8)
    for _ in range(CHANGES + 1):
        marks = np.where(random.random((height // 32, width // 16)) < 0.6, 30, 250).astype(np.uint8)
        window = marks.repeat(16, 0).repeat(8, 1)
        window[np.arange(len(window)) % 16 >= 9] = 250  # between the lines
        top, left = random.integers(0, height // 2), random.integers(0, width // 2)
        screen[top : top + len(window), left : left + width // 2] = window[..., None]
        yield screen
