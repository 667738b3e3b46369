"""Time to first token of a second question about the same video, named by its path, at another rate."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ask import ask
from benchmarks.clips import RATE, another_path, clip, scene_clip
from benchmarks.table import Row, Timings
from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Video

LARGE_PX = 224 * 224
QUESTIONS = {"first": ("What happens in the video?", 0.75), "second": ("Which shape moves?", 0.5)}
LARGE_AT_MOST, DEMO_AT_MOST = 0.05, 0.15
# A file that has just been written is hashed again: see `framesieve.services.preprocessing.sources.digests`.
SETTLED_S = 2.5


def second_question(rounds: int) -> list[Row]:
    """For a larger video, and for the demo's, where fixed costs dominate both questions."""
    return asyncio.run(_second_question(rounds))


async def _second_question(rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with LocalStack(media_root=folder) as stack, FramesieveClient(stack.address) as client:
            large, demo = large_videos(folder, rounds + 1), demo_videos(folder, rounds + 1)
            await asyncio.sleep(SETTLED_S)
            return [
                await _row(client, "8 s of 720p", large, LARGE_AT_MOST),
                await _row(client, "the demo's clip", demo, DEMO_AT_MOST),
            ]


async def _row(client: FramesieveClient, name: str, videos: Sequence[Video], at_most: float) -> Row:
    taken, stages = Timings(), {which: Timings() for which in QUESTIONS}
    names: tuple[str, ...] = ()
    for number, video in enumerate(videos):
        for which, (question, rate) in QUESTIONS.items():
            asked, finished = await ask(client, video, question, pruning_rate=rate, max_new_tokens=2)
            stages_s = finished.timings.stages_s
            names = tuple(stages_s)
            if not number:  # the first is a warm-up
                continue
            taken.add(which, asked.first_token_s)
            for stage, stage_s in stages_s.items():
                stages[which].add(stage, stage_s)
    note = "; ".join(
        f"{which} at rate {QUESTIONS[which][1]:g}: "
        + ", ".join(f"{stage} {found.median(stage) * 1e3:.1f}" for stage in names)
        for which, found in stages.items()
    )
    what = f"{name}, first token of a second question at another rate"
    ours, theirs = taken.median("second"), taken.median("first")
    return Row(what, "the first question", ours, theirs, "s", at_most=at_most, note=f"stages in ms, {note}")


def demo_videos(folder: Path, count: int) -> list[Video]:
    return [Video(server_path=another_path(folder, scene_clip(number))) for number in range(count)]


def large_videos(folder: Path, count: int) -> list[Video]:
    data = clip(8 * RATE, 720, 1280, keyframe_every=60)
    return [Video(server_path=another_path(folder, data), max_pixels=LARGE_PX) for _ in range(count)]
