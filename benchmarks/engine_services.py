"""One client of the three services against transformers, from the file's bytes to the tokens; and a second question.

Float32 on both sides, 64 new tokens, end tokens ignored. Every question is about a file that no cache knows, except the
second question, which is about the same video at the same rate.
"""

from __future__ import annotations

import asyncio
import sys
import time

from benchmarks.engine_models import Model
from benchmarks.media_clips import RATE, another_file, clip
from benchmarks.peer import Peer
from benchmarks.table import Row, Timings
from framesieve.cli.launcher import LocalStack
from framesieve.client.answer import Delta
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Video

NEW_TOKENS = 64
SECONDS, HEIGHT_PX, WIDTH_PX, KEYFRAME_EVERY = 16, 360, 640, 60
FIRST, SECOND = "What happens in the video?", "Which shape moves, and where does it go?"
FLAGS = {"encoder": ["--dtype", "float32"], "generation": ["--dtype", "float32"]}
RATES = (0.0, 0.75)


def through_services(model: Model, rounds: int) -> list[Row]:
    """Time to first token and tokens/s of one client, and the time to first token of a second question."""
    return asyncio.run(_through_services(model, rounds))


async def _through_services(model: Model, rounds: int) -> list[Row]:
    data = clip(SECONDS * RATE, HEIGHT_PX, WIDTH_PX, KEYFRAME_EVERY)
    taken = Timings()
    peer = Peer(model.folder)
    async with LocalStack(model.folder, flags=FLAGS) as stack, FramesieveClient(stack.address) as client:
        for index in range(rounds + 1):
            timed: dict[str, tuple[float, float]] = {}
            theirs = await asyncio.to_thread(peer.ask, data, FIRST, NEW_TOKENS, NEW_TOKENS)
            timed["transformers"] = theirs.first_token_s, NEW_TOKENS / theirs.total_s
            for rate in RATES:
                video = Video(data=another_file(data))
                timed[f"ours {rate:g}"] = await _ask(client, video, FIRST, rate)
                timed[f"again {rate:g}"] = await _ask(client, video, SECOND, rate)
            print(f"services, {model.name}: round {index} of {rounds}", file=sys.stderr)
            for name, (first_token_s, tokens_per_s) in timed.items() if index else ():
                taken.add(f"{name} first", first_token_s)
                taken.add(f"{name} rate", tokens_per_s)
    what = f"{model.name}: {SECONDS} s of {WIDTH_PX}×{HEIGHT_PX} in, {NEW_TOKENS} tokens out"
    rows = []
    for rate in RATES:
        goals = rate == 0 and not model.small
        first, speed = (taken.median(f"ours {rate:g} {kind}") for kind in ("first", "rate"))
        their_first, their_speed = (taken.median(f"transformers {kind}") for kind in ("first", "rate"))
        again = taken.median(f"again {rate:g} first")
        rows += [
            Row(
                f"{what}: first token, rate {rate:g}",
                "`generate`",
                first,
                their_first,
                "s",
                at_most=0.5 if goals else None,
            ),
            Row(
                f"{what}: tokens, rate {rate:g}",
                "`generate`",
                speed,
                their_speed,
                "1/s",
                at_least=2.0 if goals else None,
            ),
            Row(
                f"{what}: first token of a second question, rate {rate:g}", "the first", again, first, "s", at_most=0.1
            ),
        ]
    return rows


async def _ask(client: FramesieveClient, video: Video, question: str, rate: float) -> tuple[float, float]:
    """Seconds to the first token, and tokens/s over the whole completion."""
    start = time.perf_counter()
    first_token_s = 0.0
    stream = client.stream(
        video, question, pruning_rate=rate, max_new_tokens=NEW_TOKENS, ignore_eos=True, temperature=0
    )
    async for event in stream:
        if isinstance(event, Delta) and not first_token_s:
            first_token_s = time.perf_counter() - start
    return first_token_s, NEW_TOKENS / (time.perf_counter() - start)
