"""`make bench`: one request against transformers' generate, the cost of the split into processes, and throughput.

Every configuration runs once per round, so that other load on the machine affects all of them; medians over rounds.
Prints Markdown to stdout and progress to stderr. Everything runs in float32, from the clip's bytes to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ask import ask
from benchmarks.clips import another_file, scene_clip
from benchmarks.one_process import OneProcess
from benchmarks.peers.generate import Peer
from benchmarks.report import Beginning
from benchmarks.timing import Summary, Timed
from gridsieve.cli.launcher import LocalStack
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Video
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.common.telemetry.logs import configure_logging

RATES = (0.0, 0.5, 0.75, 0.9)
CLIENTS = (1, 8)
QUESTION = "What happens in the video?"
# The same clips are asked about repeatedly, and each question should cost as much as the first: the encoder's cache
# is off, and every file has different bytes (`another_file`), so that the prefix cache misses.
FLAGS = {"encoder": ["--dtype", "float32", "--cache-bytes", "0"], "generation": ["--dtype", "float32"]}


async def asked(client: GridsieveClient, clip: bytes, rate: float, max_new_tokens: int) -> Timed:
    video = Video(data=another_file(clip))
    return (await ask(client, video, QUESTION, pruning_rate=rate, max_new_tokens=max_new_tokens))[0]


async def latency(client: GridsieveClient, folder: Path, rounds: int, max_new_tokens: int) -> list[str]:
    """One request at a time: the baseline, the three processes, and the same parts in one process."""
    clip = scene_clip(0)
    peer = Peer(folder)
    found: dict[tuple[str, float], list[Timed]] = {}
    with OneProcess(folder) as one:
        for index in range(rounds + 1):
            timed = {("transformers", 0.0): await asyncio.to_thread(peer.ask, clip, QUESTION, max_new_tokens)}
            for rate in RATES:
                timed["one process", rate] = await asyncio.to_thread(
                    one.ask, clip, QUESTION, ItemPruning(rate), max_new_tokens
                )
                timed["three processes", rate] = await asked(client, clip, rate, max_new_tokens)
            print(f"latency: round {index} of {rounds}{' (warm-up)' * (index == 0)}", file=sys.stderr)
            for key, value in timed.items() if index else ():
                found.setdefault(key, []).append(value)
    base = Summary.of(found["transformers", 0.0])
    lines = [
        "| what | rate | time to first token | × transformers | total | × transformers | new tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for (name, rate), values in sorted(found.items(), key=lambda item: (item[0][0] != "transformers", item[0])):
        summary = Summary.of(values)
        lines.append(
            f"| {name} | {rate:g} | {summary.first_token_s * 1e3:.0f} ms | "
            f"{base.first_token_s / summary.first_token_s:.2f} | {summary.total_s * 1e3:.0f} ms | "
            f"{base.total_s / summary.total_s:.2f} | {values[0].tokens} |"
        )
    return lines


async def throughput(
    client: GridsieveClient, folder: Path, rounds: int, requests: int, max_new_tokens: int
) -> list[str]:
    """Requests/s over distinct clips, in closed loops; the baseline answers one request after another."""
    clips = [scene_clip(1 + index) for index in range(requests)]
    peer = Peer(folder)
    rates: dict[tuple[str, int, float], list[float]] = {}
    for index in range(rounds):
        start = time.perf_counter()
        for clip in clips:
            await asyncio.to_thread(peer.ask, clip, QUESTION, max_new_tokens)
        rates.setdefault(("transformers", 1, 0.0), []).append(requests / (time.perf_counter() - start))
        for clients in CLIENTS:
            for rate in (0.0, 0.75):
                found = await closed_loop(client, clips, clients, rate, max_new_tokens)
                rates.setdefault(("three processes", clients, rate), []).append(found)
        print(f"throughput: round {index + 1} of {rounds}", file=sys.stderr)
    base = statistics.median(rates["transformers", 1, 0.0])
    lines = ["| what | clients | rate | requests/s | × transformers |", "|---|---|---|---|---|"]
    for (name, clients, rate), values in rates.items():
        median = statistics.median(values)
        lines.append(f"| {name} | {clients} | {rate:g} | {median:.2f} | {median / base:.2f} |")
    return lines


async def closed_loop(
    client: GridsieveClient, clips: Sequence[bytes], clients: int, rate: float, max_new_tokens: int
) -> float:
    """Requests/s of a closed loop with `clients` concurrent requests."""
    waiting = iter(clips)

    async def one() -> None:
        for clip in waiting:
            await asked(client, clip, rate, max_new_tokens)

    start = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(clients)))
    return len(clips) / (time.perf_counter() - start)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=24, help="of each throughput run")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    args = parser.parse_args()
    configure_logging("benchmarks", "auto", "warning")  # to stderr
    print(Beginning.of("run"))
    async with LocalStack(args.model, flags=FLAGS) as stack, GridsieveClient(stack.address) as client:
        print(*await latency(client, args.model, args.rounds, args.max_new_tokens), sep="\n")
        print()
        lines = await throughput(client, args.model, max(5, args.rounds // 2), args.requests, args.max_new_tokens)
        print(*lines, sep="\n")


if __name__ == "__main__":
    asyncio.run(main())
