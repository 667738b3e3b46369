"""Time to first token by stage, for a question about 120 frames through the three services, at both rates."""

from __future__ import annotations

import asyncio
import sys

from benchmarks.gpu_run import Run
from benchmarks.media_clips import another_file, clip
from benchmarks.table import Row, Timings
from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Video

FRAMES, CLIP_FPS, SAMPLED_FPS = 120, 30, 2
HEIGHT_PX, WIDTH_PX, KEYFRAME_EVERY = 360, 640, 60
RATES = (0.0, 0.75)
QUESTION = "What happens in the video?"


def first_token(run: Run) -> list[Row]:
    """Seconds of each stage, which sum to the time to first token; every clip is new to all caches."""
    return asyncio.run(_first_token(run))


async def _first_token(run: Run) -> list[Row]:
    data = clip(FRAMES * CLIP_FPS // SAMPLED_FPS, HEIGHT_PX, WIDTH_PX, KEYFRAME_EVERY)
    taken = Timings()
    stages: tuple[str, ...] = ()
    flags = {name: ["--device", str(run.device)] for name in ("encoder", "generation")}
    async with LocalStack(run.folder, flags=flags) as stack, FramesieveClient(stack.address) as client:
        for index in range(run.rounds + 1):
            for rate in RATES:
                video = Video(data=another_file(data), fps=SAMPLED_FPS)
                answer = await client.ask(video, QUESTION, pruning_rate=rate, max_new_tokens=8, ignore_eos=True)
                spent = {**answer.timings.stages_s, "total": answer.timings.time_to_first_token_s}
                stages = tuple(spent)
                for stage, seconds in spent.items() if index else ():
                    taken.add(f"{stage} {rate}", seconds)
            print(f"first token: round {index} of {run.rounds}", file=sys.stderr)
    return [
        Row(
            f"first token on {FRAMES} frames, rate {rate}: {stage}",
            "the whole",
            taken.median(f"{stage} {rate}"),
            taken.median(f"total {rate}"),
            "s",
        )
        for rate in RATES
        for stage in stages
    ]
