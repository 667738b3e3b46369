"""Exact match of the demo model on unseen clips, by pruning method and rate: `python -m demo.evaluate`.

Completions come from the three services as separate processes, with many concurrent requests. At each rate, all methods
keep as many tokens as EVS does; one that cannot keeps the next number below, or its fewest. The column "auto" is the
method before the tower with a threshold, which keeps at most as many. First each is timed: one question at a time,
about clips that no cache has. The tables are Markdown.

Example: python -m demo.evaluate --rates 0.75 0.9 --methods evs vcast random --clips 130 --picture accuracy.png
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

from benchmarks.ask import ask
from benchmarks.clips import another_file
from demo.clips import EVALUATION_CLIPS, EVALUATION_SEEDS, FRAMES, scene_of
from demo.comparison import Answered, Cell, tables
from demo.drawing import encode
from demo.lessons import COLUMNS, ROWS
from demo.questions import TOPICS, Question, questions_about
from gridsieve.cli.launcher import LocalStack
from gridsieve.cli.signals import unwind_on_signals
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Video
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import (
    AUTO_THRESHOLD,
    BEFORE_TOWER,
    EVS,
    EVS_CAUSAL,
    METHODS,
    NONE,
    PIXEL_CHANGE,
    RANDOM,
    ItemPruning,
    num_kept,
)

RATES = (0.5, 0.75, 0.85, 0.9, 0.95)
CLIPS_IN_FLIGHT = 4
ANSWERS_IN_FLIGHT = 128
TIMED_CLIPS = 15
AUTO = "auto"
GRID = Grid(FRAMES // 2, ROWS, COLUMNS)


@dataclass(frozen=True, slots=True)
class Compared:
    """A pruning that is compared at a rate of EVS, which may not be its own. method: its name in the tables."""

    rate: float
    method: str
    pruning: ItemPruning


def compared(rates: Sequence[float], methods: Sequence[str]) -> list[Compared]:
    """No pruning, and every method at every rate."""
    return [
        Compared(0.0, NONE, ItemPruning(0.0, NONE)),
        *(Compared(rate, method, pruning_at(rate, method)) for rate in rates for method in methods),
    ]


def pruning_at(rate: float, method: str) -> ItemPruning:
    """The pruning that keeps as many tokens of a clip as EVS at `rate`, or the most below, or the method's fewest."""
    count = num_kept(GRID, ItemPruning(rate, EVS))
    if method == EVS_CAUSAL:
        each = max(1, (count - GRID.slice_tokens) // (GRID.t - 1))
        # Half a token below the border of two numbers, as counts are rounded down.
        return ItemPruning(_rate(each, GRID.slice_tokens), method)
    if method == AUTO:
        return ItemPruning(_rate(count, GRID.tokens), PIXEL_CHANGE, threshold=AUTO_THRESHOLD)
    return ItemPruning(_rate(count, GRID.tokens), method)


def _rate(kept: int, tokens: int) -> float:
    return max(0.0, round(1 - (kept + 0.5) / tokens, 6))


def questions_of(seed: int, count: int) -> list[Question]:
    """`count` of the questions about the clip of `seed`, of as many topics as there are."""
    rng = Random(seed)
    every = questions_about(scene_of(seed), rng)
    rng.shuffle(every)
    topic = {kind: name for name, kinds in TOPICS.items() for kind in kinds}
    seen: dict[str, int] = {}
    ranked = []
    for question in every:
        name = topic[question.kind]
        seen[name] = seen.get(name, 0) + 1
        ranked.append((seen[name], question))
    return [question for _, question in sorted(ranked, key=lambda pair: pair[0])[:count]]


def encoded(seed: int) -> bytes:
    """The clip of `seed`."""
    return encode(scene_of(seed))


async def ask_services(
    model: Path, seeds: Sequence[int], questions: int, prunings: Sequence[ItemPruning]
) -> dict[ItemPruning, list[Answered]]:
    """Ask every question about every clip with every pruning, through the three services."""
    found: dict[ItemPruning, list[Answered]] = {pruning: [] for pruning in prunings}
    with get_context("spawn").Pool(1) as pool:
        async with LocalStack(model) as stack, GridsieveClient(stack.address) as client:
            clips = pool.imap(encoded, seeds)
            started, done, places = time.monotonic(), 0, asyncio.Semaphore(ANSWERS_IN_FLIGHT)
            for batch in _batches(seeds, CLIPS_IN_FLIGHT):
                files = [await asyncio.to_thread(next, clips) for _ in batch]
                asked = [
                    (pruning, clip, seed, question)
                    for seed, clip in zip(batch, files, strict=True)
                    for question in questions_of(seed, questions)
                    for pruning in prunings
                ]
                answers = await asyncio.gather(*(_ask(client, places, *one) for one in asked))
                for (pruning, *_), answer in zip(asked, answers, strict=True):
                    found[pruning].append(answer)
                done += len(batch)
                if done % 20 < CLIPS_IN_FLIGHT:
                    rate = done * questions * len(prunings) / (time.monotonic() - started)
                    print(f"{done} of {len(seeds)} clips, about {rate:.0f} answers/s", file=sys.stderr, flush=True)
    return found


async def _ask(
    client: GridsieveClient,
    places: asyncio.Semaphore,
    pruning: ItemPruning,
    clip: bytes,
    seed: int,
    question: Question,
) -> Answered:
    async with places:
        answer = await client.ask(
            Video(data=clip),
            question.text,
            pruning_rate=pruning.rate,
            pruning_method=pruning.method,
            pruning_threshold=pruning.threshold,
            pruning_seed=seed if pruning.method == RANDOM else None,
        )
    (item,) = answer.usage.media
    right = answer.text.strip() == question.answer
    return Answered(seed, scene_of(seed).kind, question.kind, item.num_kept, right)


async def first_tokens(model: Path, seeds: Sequence[int], prunings: Sequence[ItemPruning]) -> dict[ItemPruning, float]:
    """Median seconds to the first token of a question that is asked alone, about a clip that no cache has."""
    found: dict[ItemPruning, list[float]] = {pruning: [] for pruning in prunings}
    async with (
        LocalStack(model, flags={"encoder": ["--cache-bytes", "0"]}) as stack,
        GridsieveClient(stack.address) as client,
    ):
        for number, seed in enumerate(seeds):
            clip, (question, *_) = await asyncio.to_thread(encoded, seed), questions_of(seed, 1)
            for pruning in (*prunings[number:], *prunings[:number]):  # each pruning is the first in turn
                timed, _ = await ask(
                    client,
                    Video(data=another_file(clip)),
                    question.text,
                    max_new_tokens=1,
                    pruning_rate=pruning.rate,
                    pruning_method=pruning.method,
                    pruning_threshold=pruning.threshold,
                )
                if number:  # the first clip warms up
                    found[pruning].append(timed.first_token_s)
    return {pruning: statistics.median(each) for pruning, each in found.items()}


def _batches(seeds: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (seeds[start : start + size] for start in range(0, len(seeds), size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument(
        "--timed-model",
        type=Path,
        help="time this checkpoint instead, whose tower weighs something",
    )
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="RATE")
    methods = [*(method for method in METHODS if method != NONE), AUTO]
    parser.add_argument("--methods", nargs="+", default=methods, choices=methods, metavar="METHOD")
    parser.add_argument("--clips", type=int, default=EVALUATION_CLIPS)
    parser.add_argument("--questions", type=int, default=5, help="questions per clip")
    parser.add_argument("--picture", type=Path, help="a PNG file to draw the comparison into")
    parser.add_argument("--time-picture", type=Path, help="a PNG file to draw accuracy over time into")
    parser.add_argument("--json", action="store_true", help="print every answer as JSON to stdout")
    args = parser.parse_args()
    seeds = range(EVALUATION_SEEDS, EVALUATION_SEEDS + args.clips)
    wanted = compared(args.rates, args.methods)
    unwind_on_signals()
    prunings = list(dict.fromkeys(each.pruning for each in wanted))
    first_s = asyncio.run(first_tokens(args.timed_model or args.model, seeds[: TIMED_CLIPS + 1], prunings))
    found = asyncio.run(ask_services(args.model, seeds, args.questions, prunings))
    cells = [
        Cell(
            each.rate,
            each.method,
            tuple(found[each.pruning]),
            first_s[each.pruning],
            each.pruning.method in BEFORE_TOWER,
        )
        for each in wanted
    ]
    if args.picture or args.time_picture:
        from demo.comparison_plot import draw, draw_times

        if args.picture:
            draw(cells, args.picture)
        if args.time_picture:
            draw_times(cells, args.time_picture)
    print(json.dumps([asdict(cell) for cell in cells]) if args.json else tables(cells))


if __name__ == "__main__":
    main()
