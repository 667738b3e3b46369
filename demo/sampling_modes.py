"""Exact match of the demo model on unseen clips, by sampling mode and keyframes: `python -m demo.sampling_modes`.

Each clip is encoded with keyframes at several intervals. "between": clips whose motions all begin and end between two
keyframes. The table is Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from collections import defaultdict
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from demo.clips import EVALUATION_SEEDS, scene_of
from demo.drawing import encode
from demo.evaluate import questions_of
from demo.scenes import DURATION_S, Scene
from gridsieve.cli.launcher import LocalStack
from gridsieve.cli.signals import unwind_on_signals
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Video
from gridsieve.common.checkpoint import DEMO_MODEL

INTERVALS_S = (1, 2, 4, None)
QUESTIONS = 4
FEW = (2, 8)
ANSWERS_IN_FLIGHT = 16


@dataclass(frozen=True, slots=True)
class Case:
    """interval: of keyframes, as it is printed. frames: how they are chosen. clips: of which kind of scenes."""

    interval: str
    frames: str
    clips: str


def wishes(every_s: int | None) -> dict[str, dict[str, Any]]:
    """How frames are chosen of clips with this interval of keyframes, by name."""
    keyframes: dict[str, dict[str, Any]] = {"keyframes": {"mode": "keyframes"}}
    if every_s is not None:
        return keyframes | {"uniform, as many": {"num_frames": DURATION_S // every_s}, "uniform": {}}
    modes = ("uniform", "shots")
    few = {f"{mode}, {frames}": {"mode": mode, "num_frames": frames} for mode in modes for frames in FEW}
    return keyframes | few | {"uniform": {}}


def lies_between(scene: Scene, every_s: int | None) -> bool:
    motions = [each.motion for each in scene.movers if each.motion]
    if every_s is None or not motions:
        return False
    return all(each.start_s // every_s == each.stop_s // every_s for each in motions)


async def answered(clips: int) -> dict[Case, list[tuple[bool, int]]]:
    """Whether each answer was right, and how many frames it was given by."""
    found: dict[Case, list[tuple[bool, int]]] = defaultdict(list)
    places = asyncio.Semaphore(ANSWERS_IN_FLIGHT)
    async with LocalStack(DEMO_MODEL) as stack, GridsieveClient(stack.address) as client:

        async def ask(cases: list[Case], video: Video, question: str, answer: str) -> None:
            async with places:
                got = await client.ask(video, question, pruning_rate=0.0)
            for case in cases:
                found[case].append((got.text.strip() == answer, got.usage.media[0].sampled_frames))

        for seed in range(EVALUATION_SEEDS, EVALUATION_SEEDS + clips):
            scene = scene_of(seed)
            asked: list[Coroutine[Any, Any, None]] = []
            for every_s in INTERVALS_S:
                data = await asyncio.to_thread(encode, scene, every_s)
                interval = "as x264 puts them" if every_s is None else f"every {every_s} s"
                kinds = ["all", scene.kind, *["between"] * lies_between(scene, every_s)]
                for frames, wish in wishes(every_s).items():
                    cases = [Case(interval, frames, kind) for kind in kinds if kind in ("all", "cut", "between")]
                    video = Video(data=data, **wish)
                    asked += [ask(cases, video, each.text, each.answer) for each in questions_of(seed, QUESTIONS)]
            await asyncio.gather(*asked)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=40)
    clips = parser.parse_args().clips
    unwind_on_signals()
    print("| keyframes | frames | clips | right | questions | frames, on average |\n|---|---|---|---|---|---|")
    for case, answers in asyncio.run(answered(clips)).items():
        right, frames = (statistics.fmean(each) for each in zip(*answers, strict=True))
        print(f"| {case.interval} | {case.frames} | {case.clips} | {right:.3f} | {len(answers)} | {frames:.1f} |")


if __name__ == "__main__":
    main()
