"""Time to first token of a second question about the same video, named by its path: at another rate, whose tokens the
encoder has, and at the same one, whose keys, values and recurrent states generation has."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from benchmarks.ask import ask
from benchmarks.clips import RATE, another_path, clip, scene_clip
from benchmarks.models import SMALL_RECURRENT
from benchmarks.table import Row, Timings
from gridsieve.cli.launcher import LocalStack
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Video

LARGE_PX = 224 * 224
Questions: TypeAlias = Mapping[str, tuple[str, float]]
QUESTIONS: Questions = {"first": ("What happens in the video?", 0.75), "second": ("Which shape moves?", 0.5)}
ALIKE: Questions = {"first": ("What happens in the video?", 0.75), "second": ("Which shape moves?", 0.75)}
LARGE_AT_MOST, DEMO_AT_MOST, ALIKE_AT_MOST = 0.05, 0.15, 0.10
# A file that has just been written is hashed again: see `gridsieve.services.preprocessing.sources.digests`.
SETTLED_S = 2.5


def second_question(rounds: int) -> list[Row]:
    """For a larger video, and for the demo's, where fixed costs dominate both questions; and in a model of 60 M
    parameters whose layers have recurrent states."""
    return asyncio.run(_second_question(rounds))


async def _second_question(rounds: int) -> list[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        async with LocalStack(media_root=folder) as stack, GridsieveClient(stack.address) as client:
            large, demo = large_videos(folder, rounds + 1), demo_videos(folder, rounds + 1)
            await asyncio.sleep(SETTLED_S)
            another = "at another rate"
            rows = [
                await _row(client, f"8 s of 720p, {another}", large, QUESTIONS, LARGE_AT_MOST),
                await _row(client, f"the demo's clip, {another}", demo, QUESTIONS, DEMO_AT_MOST),
            ]
        model = SMALL_RECURRENT.save(SMALL_RECURRENT.drawn(), folder / "model")
        async with LocalStack(model, media_root=folder) as stack, GridsieveClient(stack.address) as client:
            large = large_videos(folder, rounds + 1)
            await asyncio.sleep(SETTLED_S)
            what = "8 s of 720p, at the same rate, recurrent states"
            return [*rows, await _row(client, what, large, ALIKE, ALIKE_AT_MOST)]


async def _row(
    client: GridsieveClient, name: str, videos: Sequence[Video], questions: Questions, at_most: float
) -> Row:
    taken, stages = Timings(), {which: Timings() for which in questions}
    names: tuple[str, ...] = ()
    for number, video in enumerate(videos):
        for which, (question, rate) in questions.items():
            asked, finished = await ask(client, video, question, pruning_rate=rate, max_new_tokens=2)
            stages_s = finished.timings.stages_s
            names = tuple(stages_s)
            if not number:  # the first is a warm-up
                continue
            taken.add(which, asked.first_token_s)
            for stage, stage_s in stages_s.items():
                stages[which].add(stage, stage_s)
    note = "; ".join(
        f"{which} at rate {questions[which][1]:g}: "
        + ", ".join(f"{stage} {found.median(stage) * 1e3:.1f}" for stage in names)
        for which, found in stages.items()
    )
    what = f"{name}: first token of a second question"
    computed = finished.usage.prompt_tokens - finished.usage.cached_prompt_tokens
    note += f"; of its {finished.usage.prompt_tokens} prompt tokens, {computed} were computed"
    ours, theirs = taken.median("second"), taken.median("first")
    return Row(what, "the first question", ours, theirs, "s", at_most=at_most, note=f"stages in ms, {note}")


def demo_videos(folder: Path, count: int) -> list[Video]:
    return [Video(server_path=another_path(folder, scene_clip(number))) for number in range(count)]


def large_videos(folder: Path, count: int) -> list[Video]:
    data = clip(8 * RATE, 720, 1280, keyframe_every=60)
    return [Video(server_path=another_path(folder, data), max_pixels=LARGE_PX) for _ in range(count)]
