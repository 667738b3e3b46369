"""A model with a head that drafts beside the same without: `python -m benchmarks.drafts`.

Two generation services share an encoder and alternate in every round. They are asked what happens in clips of scenes
that no training used, whose answers are the longest that the demo model gives. The clips are in the caches, so that the
figures are about answers; those of one client begin with the first token. `answers` is the demo model with its EAGLE-3
head, `mtp` the model of Qwen3.5's layout that `make demo-mtp` trains, with its own layer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.clips import FIRST_SEED, scene_clip
from benchmarks.report import run
from benchmarks.table import Row, Timings
from demo.scenes import random_scene
from gridsieve import GridsieveClient, Video
from gridsieve.cli.launcher import Endpoint, LocalStack
from gridsieve.client.answer import Answer
from gridsieve.common.checkpoint import DEMO_DRAFT, DEMO_MODEL
from gridsieve.common.contract.retention import EVS

MTP_MODEL = Path("build/gridsieve-demo-mtp")  # made by `make demo-mtp`
QUESTIONS = ("What happens in the video?", "Describe the video.")
RATES, RATES_OF_MTP = (0.0, 0.75), (0.0, 0.5, 0.75, 0.9)
CLIPS, CLIENTS = 16, 32
KINDS = ("without", "with")
GOALS = ((1, 1.6), (32, 1.0))


def answers(rounds: int) -> list[Row]:
    """Tokens/s of one and of 32 clients, and the share of draft tokens that are accepted."""
    return _compared(rounds, DEMO_MODEL, str(DEMO_DRAFT), RATES, GOALS)


def mtp(rounds: int) -> list[Row]:
    """The same of multi-token prediction."""
    return _compared(rounds, MTP_MODEL, "mtp", RATES_OF_MTP, ((1, None), (32, None)))


def _compared(
    rounds: int, model: Path, head: str, rates: Sequence[float], goals: Sequence[tuple[int, float | None]]
) -> list[Row]:
    with LocalStack(model) as stack, drafting(stack, model, head) as other:
        return asyncio.run(_measured(rounds, rates, goals, stack.address, other.address))


def drafting_flags(head: str) -> list[str]:
    return ["--draft-model", head, "--num-draft-tokens", "5"]


@contextmanager
def drafting(stack: LocalStack, model: Path, head: str) -> Iterator[LocalStack]:
    """Another generation service beside those of a stack, whose model has a head that drafts."""
    flags = {"generation": drafting_flags(head)}
    with TemporaryDirectory(prefix="gridsieve-") as folder:
        endpoints = {name: Endpoint(address, 0) for name, address in stack.addresses.items()}
        endpoints["generation"] = Endpoint(f"unix:{folder}/generation.sock", 0)
        with LocalStack(model, services=["generation"], endpoints=endpoints, flags=flags) as other:
            yield other


async def _measured(
    rounds: int, rates: Sequence[float], goals: Sequence[tuple[int, float | None]], *addresses: str
) -> list[Row]:
    taken, drafts = Timings(), Counter[str]()
    films = [Video(data=clip) for clip in clips()]
    async with GridsieveClient(addresses[0]) as plain, GridsieveClient(addresses[1]) as drafter:
        for index in range(rounds + 1):
            for rate in rates:
                said = list[list[str]]()
                for kind, client in zip(KINDS, (plain, drafter), strict=True):
                    found = [await _asked(client, film, QUESTIONS[0], rate) for film in films]
                    said.append([each.text for each in found])
                    together, seconds = await _together(client, films, rate)
                    if not index:  # it also fills the caches
                        continue
                    tokens = sum(each.usage.completion_tokens - 1 for each in found)
                    taken.add(f"1 {rate} {kind}", tokens / sum(each.timings.generate_s for each in found))
                    taken.add(f"32 {rate} {kind}", sum(each.usage.completion_tokens for each in together) / seconds)
                    if kind == "with":
                        drafts[f"drafted {rate}"] += sum(each.usage.draft_tokens for each in found)
                        drafts[f"accepted {rate}"] += sum(each.usage.accepted_draft_tokens for each in found)
                assert said[0] == said[1], "drafts never change an answer"
    rows = []
    for clients, goal in goals:
        for rate in rates:
            theirs, ours = (taken.median(f"{clients} {rate} {kind}") for kind in KINDS)
            what = f"{clients} client{'s' * (clients > 1)}, rate {rate:g}"
            rows.append(Row(what, "without the head", ours, theirs, "tokens/s", at_least=goal))
    unpruned, *pruned = (100 * drafts[f"accepted {rate}"] / drafts[f"drafted {rate}"] for rate in rates)
    least = 1 - 5 / unpruned
    return rows + [
        Row(f"accepted draft tokens, rate {rate:g}", "rate 0", each, unpruned, "%", at_least=least)
        for rate, each in zip(rates[1:], pruned, strict=True)
    ]


async def _together(client: GridsieveClient, films: Sequence[Video], rate: float) -> tuple[list[Answer], float]:
    """The answers of 32 clients that ask at once, and how long they take."""
    asked = [(film, question) for question in QUESTIONS for film in films]
    start = time.perf_counter()
    found = await asyncio.gather(*(_asked(client, film, question, rate) for film, question in asked))
    return found, time.perf_counter() - start


def _asked(client: GridsieveClient, film: Video, question: str, rate: float) -> Awaitable[Answer]:
    return client.ask(film, question, pruning_rate=rate, pruning_method=EVS, temperature=0, max_new_tokens=48)


def clips() -> list[bytes]:
    """Of scenes with two objects and one shot: of those with more the question has no answer."""
    scenes = (number for number in range(1000) if _tells(number))
    return [scene_clip(number) for number in islice(scenes, CLIPS)]


def _tells(number: int) -> bool:
    scene = random_scene(FIRST_SEED + number)
    return len(scene.things) == 2 and scene.cut_s is None


if __name__ == "__main__":
    run("drafts", __doc__, {"answers": answers}, rounds=5, least_rounds=1, long={"mtp": mtp})
