"""What the encoder's sharing is worth: slices of many videos in one forward, and a second question about one video.

`python -m benchmarks.encoder_cache`. Both sides of a ratio are measured in every round, so that what else the machine
does is shared by both; medians over rounds. Prints Markdown to stdout and progress to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.timing import machine
from client.answer import Delta, Finished, Timings
from client.client import FramesieveClient
from client.encoding import encode as encode_media
from client.launcher import LocalStack
from client.prompt import Video
from demo.scenes import encode, random_scene

VIDEOS = 8
FIRST_SEED = 9_100_000
QUESTIONS = (("What happens in the video?", 0.75), ("Which shape moves?", 0.5))


async def at_once_and_in_turn(address: str, rounds: int) -> list[str]:
    """Videos per second through preprocessing and encoder, all at once against one after another."""
    in_turn, at_once = list[float](), list[float]()
    for index in range(rounds + 1):
        clips = [encode(random_scene(FIRST_SEED + index * VIDEOS + place)) for place in range(VIDEOS)]
        start = time.perf_counter()
        for clip in clips:
            await encode_media(address, Video(data=clip))
        middle = time.perf_counter()
        await asyncio.gather(*(encode_media(address, Video(data=clip)) for clip in clips))
        end = time.perf_counter()
        print(f"encode: round {index} of {rounds}{' (warm-up)' * (index == 0)}", file=sys.stderr)
        if index:
            in_turn.append(middle - start)
            at_once.append(end - middle)
    turn_s, once_s = statistics.median(in_turn), statistics.median(at_once)
    return [
        f"| {VIDEOS} videos | seconds | videos/s |",
        "|---|---|---|",
        f"| one after another | {turn_s:.3f} | {VIDEOS / turn_s:.1f} |",
        f"| at once | {once_s:.3f} | {VIDEOS / once_s:.1f} ({turn_s / once_s:.2f} ×) |",
    ]


async def first_token(client: FramesieveClient, clip: bytes, question: str, rate: float) -> tuple[float, Timings]:
    start = time.perf_counter()
    seconds = 0.0
    async for event in client.stream(Video(data=clip), question, pruning_rate=rate, max_new_tokens=2, temperature=0):
        if isinstance(event, Delta) and not seconds:
            seconds = time.perf_counter() - start
        if isinstance(event, Finished):
            return seconds, event.timings
    raise AssertionError("an answer ends with what it cost")


async def second_question(client: FramesieveClient, rounds: int) -> list[str]:
    """Time to first token of a second question, at another rate, about a video that has been asked about once."""
    found: list[list[tuple[float, Timings]]] = []
    for index in range(rounds + 1):
        clip = encode(random_scene(FIRST_SEED + 1_000_000 + index))
        found.append([await first_token(client, clip, *each) for each in QUESTIONS])
        print(f"questions: round {index} of {rounds}{' (warm-up)' * (index == 0)}", file=sys.stderr)
    first, second = ([each[place] for each in found[1:]] for place in (0, 1))
    ratio = median(second) / median(first)
    return [
        "| question | time to first token | stages, medians in ms |",
        "|---|---|---|",
        f"| first, rate {QUESTIONS[0][1]} | {median(first) * 1e3:.1f} ms | {stages(first)} |",
        f"| second, rate {QUESTIONS[1][1]} | {median(second) * 1e3:.1f} ms ({ratio:.0%}) | {stages(second)} |",
    ]


def median(found: Sequence[tuple[float, Timings]]) -> float:
    return statistics.median(seconds for seconds, _ in found)


def stages(found: Sequence[tuple[float, Timings]]) -> str:
    medians = {name: statistics.median(timings.stages_s[name] for _, timings in found) for name in found[0][1].stages_s}
    return ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in medians.items())


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    print(f"`python -m benchmarks.encoder_cache --rounds {rounds}`")
    print(f"{datetime.datetime.now(datetime.UTC).date()}, {machine()}\n")
    flags = {"encoder": ["--cache-bytes", "0"]}
    async with LocalStack(services=("preprocessing", "encoder"), flags=flags) as stack:
        print(*await at_once_and_in_turn(stack.addresses["encoder"], rounds), sep="\n")
    print()
    async with LocalStack() as stack, FramesieveClient(stack.address) as client:
        print(*await second_question(client, rounds), sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
