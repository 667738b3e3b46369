"""What the encoder's sharing is worth: slices of many videos in one forward, and a second question about one video.

`python -m benchmarks.encoder_cache`. Both sides of a ratio are measured in every round, so that what else the machine
does is shared by both; medians over rounds. Prints Markdown to stdout and progress to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.media_clips import clip
from benchmarks.timing import machine
from client.answer import Delta, Finished, Timings
from client.client import FramesieveClient
from client.encoding import encode as encode_media
from client.launcher import LocalStack
from client.prompt import Video
from demo.scenes import encode, random_scene

VIDEOS = 8
LARGE_PX = 224 * 224
FIRST_SEED = 9_100_000
QUESTIONS = (("What happens in the video?", 0.75), ("Which shape moves?", 0.5))


async def at_once_and_in_turn(address: str, rounds: int) -> list[str]:
    """Videos per second through preprocessing and encoder, all at once against one after another."""
    in_turn, at_once = list[float](), list[float]()
    for index in range(rounds + 1):
        videos = [encode(random_scene(FIRST_SEED + index * VIDEOS + place)) for place in range(VIDEOS)]
        start = time.perf_counter()
        for video in videos:
            await encode_media(address, Video(data=video))
        middle = time.perf_counter()
        await asyncio.gather(*(encode_media(address, Video(data=video)) for video in videos))
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


async def first_token(client: FramesieveClient, video: Video, question: str, rate: float) -> tuple[float, Timings]:
    start = time.perf_counter()
    seconds = 0.0
    async for event in client.stream(video, question, pruning_rate=rate, max_new_tokens=2, temperature=0):
        if isinstance(event, Delta) and not seconds:
            seconds = time.perf_counter() - start
        if isinstance(event, Finished):
            return seconds, event.timings
    raise AssertionError("an answer ends with what it cost")


async def second_question(client: FramesieveClient, name: str, videos: Sequence[Video]) -> list[str]:
    """Time to first token of a second question, at another rate, about a video that has been asked about once."""
    found: list[list[tuple[float, Timings]]] = []
    rounds = len(videos) - 1
    for index, video in enumerate(videos):
        found.append([await first_token(client, video, *each) for each in QUESTIONS])
        print(f"questions: round {index} of {rounds}{' (warm-up)' * (index == 0)}", file=sys.stderr)
    first, second = ([each[place] for each in found[1:]] for place in (0, 1))
    ratio = median(second) / median(first)
    return [
        f"| {name} | time to first token | stages, medians in ms |",
        "|---|---|---|",
        f"| first, rate {QUESTIONS[0][1]} | {median(first) * 1e3:.1f} ms | {stages(first)} |",
        f"| second, rate {QUESTIONS[1][1]} | {median(second) * 1e3:.1f} ms ({ratio:.0%}) | {stages(second)} |",
        "",
    ]


def demo_clips(count: int) -> list[Video]:
    return [Video(data=encode(random_scene(FIRST_SEED + 1_000_000 + index))) for index in range(count)]


def large_clips(folder: Path, count: int) -> list[Video]:
    """Files of one clip with other bytes each time: a box at its end that every reader skips."""
    frames = clip(240, 720, 1280, keyframe_every=60)
    for index in range(count):
        (folder / f"{index}.mp4").write_bytes(frames + struct.pack(">I4sI", 12, b"free", index))
    return [Video(server_path=f"{index}.mp4", max_pixels=LARGE_PX) for index in range(count)]


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
    with tempfile.TemporaryDirectory() as folder:
        await questions(Path(folder), rounds)


async def questions(folder: Path, rounds: int) -> None:
    async with LocalStack(media_root=folder) as stack, FramesieveClient(stack.address) as client:
        print(*await second_question(client, "the demo's clip", demo_clips(rounds + 1)), sep="\n")
        print(*await second_question(client, "8 s of 720p", large_clips(folder, rounds + 1)), sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
