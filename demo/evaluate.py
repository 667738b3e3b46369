"""Exact match of the demo model on unseen clips, by pruning rate and method: `python -m demo.evaluate`.

Completions come from the three services as separate processes, with many concurrent requests; `--in-process` uses the
model's forward instead (`demo.exact_match`). Random pruning keeps as many tokens as EVS.

Example: python -m demo.evaluate --rates 0.5 0.75 0.9 0.95 --methods evs vidcom2 random
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLForConditionalGeneration

from common.checkpoint import DEMO_MODEL
from common.contract.retention import EVS, METHODS, NONE, RANDOM, Pruning
from demo.clips import EVALUATION_SEEDS, cached_clips
from demo.exact_match import Counts, exact_match, share_right
from demo.model import PromptWriter, use_uniform_windows
from demo.questions import Question, questions_about
from demo.scenes import encode, random_scene
from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Video

RATES = (0.0, 0.25, 0.5, 0.75, 0.9)
CLIPS_IN_FLIGHT = 4
_Z = 1.96


@dataclass(frozen=True, slots=True)
class Asked:
    """One question about one clip with one pruning, and the completion."""

    pruning: Pruning
    question: Question
    answer: str

    @property
    def right(self) -> bool:
        return self.answer.strip() == self.question.answer


def questions_of(seed: int, count: int) -> list[Question]:
    """`count` of the questions about the clip of `seed`."""
    rng = Random(seed)
    every = questions_about(random_scene(seed), rng)
    return rng.sample(every, min(count, len(every)))


def encoded(seed: int) -> bytes:
    return encode(random_scene(seed))


def prunings_of(rates: Sequence[float], methods: Sequence[str]) -> list[Pruning]:
    """Every method at every rate; rate 0 occurs once."""
    return list(dict.fromkeys(Pruning(rate, method if rate else NONE) for rate in rates for method in methods))


async def ask_services(
    model: Path, seeds: Sequence[int], questions: int, prunings: Sequence[Pruning], console: Console
) -> list[Asked]:
    """Ask every question about every clip with every pruning, through the three services."""
    asked: list[Asked] = []
    with get_context("spawn").Pool(1) as pool:
        async with LocalStack(model) as stack, FramesieveClient(stack.address) as client:
            clips = pool.imap(encoded, seeds)
            started = time.monotonic()
            for batch in _batches(seeds, CLIPS_IN_FLIGHT):
                found = [await asyncio.to_thread(next, clips) for _ in batch]
                answers = await asyncio.gather(
                    *(_ask(client, clip, seed, questions, prunings) for seed, clip in zip(batch, found, strict=True))
                )
                asked += [answer for one in answers for answer in one]
                done = batch[-1] - seeds[0] + 1
                if done % 100 < CLIPS_IN_FLIGHT:
                    rate = len(asked) / (time.monotonic() - started)
                    console.print(f"{done} of {len(seeds)} clips, {len(asked)} answers, {rate:.0f}/s", highlight=False)
    return asked


async def _ask(
    client: FramesieveClient, clip: bytes, seed: int, count: int, prunings: Sequence[Pruning]
) -> list[Asked]:
    wanted = [(pruning, question) for pruning in prunings for question in questions_of(seed, count)]
    return await asyncio.gather(*(_ask_one(client, clip, pruning, question, seed) for pruning, question in wanted))


async def _ask_one(client: FramesieveClient, clip: bytes, pruning: Pruning, question: Question, seed: int) -> Asked:
    answer = await client.ask(
        Video(data=clip),
        question.text,
        pruning_rate=pruning.rate,
        pruning_method=pruning.method,
        pruning_seed=seed if pruning.method == RANDOM else None,
    )
    return Asked(pruning, question, answer.text)


def counts_of(asked: Sequence[Asked]) -> dict[Pruning, Counts]:
    found: dict[Pruning, Counts] = {}
    for one in asked:
        found.setdefault(one.pruning, {})
        right, total = found[one.pruning].get(one.question.kind, (0, 0))
        found[one.pruning][one.question.kind] = (right + one.right, total + 1)
    return found


def ask_in_process(model: Path, seeds: range, prunings: Sequence[Pruning], cache: Path) -> dict[Pruning, Counts]:
    """Judge all questions about every clip by the model's forward."""
    network = Qwen2_5_VLForConditionalGeneration.from_pretrained(model, dtype=torch.float32)
    use_uniform_windows(network)
    writer = PromptWriter(PreTrainedTokenizerFast.from_pretrained(model))
    return exact_match(network, writer, cached_clips(cache, seeds), seeds, prunings)


def table_of(found: dict[Pruning, Counts]) -> Table:
    """A table of rates by methods; rate 0 is the same for all methods."""
    asked = sum(total for _, total in next(iter(found.values())).values())
    methods = list(dict.fromkeys(pruning.method for pruning in found if pruning.rate)) or [NONE]
    table = Table(title=f"Exact match, {asked} questions (95 % interval)")
    for heading in ("pruning rate", *methods):
        table.add_column(heading, justify="right")
    for rate in dict.fromkeys(pruning.rate for pruning in found):
        table.add_row(f"{rate:g}", *(_share(found[Pruning(rate, method if rate else NONE)]) for method in methods))
    return table


def kinds_table(found: dict[Pruning, Counts]) -> Table:
    table = Table(title="By kind of question")
    table.add_column("kind")
    for heading in ("asked", *(f"{pruning.method} {pruning.rate:g}" for pruning in found)):
        table.add_column(heading, justify="right")
    for kind, (_, total) in sorted(next(iter(found.values())).items()):
        table.add_row(kind, str(total), *(f"{counts[kind][0] / counts[kind][1]:.1%}" for counts in found.values()))
    return table


def report(found: dict[Pruning, Counts]) -> list[dict[str, object]]:
    return [
        {"rate": pruning.rate, "method": pruning.method, "exact_match": share_right(counts), "kinds": counts}
        for pruning, counts in found.items()
    ]


def _share(counts: Counts) -> str:
    """The fraction with its 95 % Wilson interval, which is also valid near 100 %."""
    share, asked = share_right(counts), sum(total for _, total in counts.values())
    spread = _Z**2 / asked
    middle = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / asked + spread / (4 * asked))
    return f"{share:.1%} ({middle - half:.1%} to {middle + half:.1%})"


def _batches(seeds: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    return (seeds[start : start + size] for start in range(0, len(seeds), size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="RATE")
    parser.add_argument("--methods", nargs="+", default=(EVS, RANDOM), choices=METHODS, metavar="METHOD")
    parser.add_argument("--clips", type=int, default=500)
    parser.add_argument("--questions", type=int, default=2, help="questions per clip, through the services")
    parser.add_argument("--in-process", action="store_true", help="without services; all questions about each clip")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/framesieve-demo"), help="for --in-process")
    parser.add_argument("--json", action="store_true", help="print JSON to stdout")
    args = parser.parse_args()
    seeds = range(EVALUATION_SEEDS, EVALUATION_SEEDS + args.clips)
    prunings = prunings_of(args.rates, args.methods)
    console = Console(stderr=args.json)
    if args.in_process:
        found = ask_in_process(args.model, seeds, prunings, args.cache)
    else:
        found = counts_of(asyncio.run(ask_services(args.model, seeds, args.questions, prunings, console)))
    if args.json:
        print(json.dumps(report(found)))
        return
    console.print(f"{args.clips} clips that were not used in training")
    console.print(table_of(found))
    console.print(kinds_table(found))


if __name__ == "__main__":
    main()
