"""What the demo model's answers attend to, and what it costs to tell it: `python -m benchmarks.attention`.

Asks what moves in scenes that no training used, in which one object moves among others, and sorts the weights of the
answers by what each token shows: the object that moves, another one, or the background. Then answers with and without
attention take turns, about a clip that all caches have. The table is Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Beginning
from demo.clips import EVALUATION_SEEDS
from demo.drawing import encode
from demo.example import CLIP
from demo.scenes import Scene, Thing, random_scene
from gridsieve.cli.launcher import LocalStack
from gridsieve.cli.signals import unwind_on_signals
from gridsieve.client.answer import Answer
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Options, Video
from gridsieve.common.contract.plan import Grid

QUESTION = "What moves?"
RATES = (0.0, 0.75)
SCENES, ROUNDS, TOKENS = 100, 30, 32
LEAST_COVERED = 0.25
PLACES = ("the object that moves", "another object", "the background")


@dataclass(frozen=True, slots=True)
class Seen:
    """The attention of one answer. shares, tokens: by place, of the attention and of the kept tokens."""

    right: bool
    media_share: float
    shares: NDArray[np.float64]
    tokens: NDArray[np.float64]


def scenes(count: int) -> Iterator[Scene]:
    """Of several objects, of which one moves."""
    every = (random_scene(seed) for seed in itertools.count(EVALUATION_SEEDS))
    return itertools.islice((each for each in every if len(each.movers) == 1 < len(each.things)), count)


def _overlap(centre: float, half: float, cells: int) -> NDArray[np.float64]:
    """The share of each of the cells, side by side from 0 to 1, that is within `half` of a place: float64 [cells]."""
    edges = np.clip(np.arange(cells + 1) / cells, centre - half, centre + half)
    return np.diff(edges) * cells


def places(scene: Scene, grid: Grid) -> NDArray[np.int64]:
    """What each token of a clip shows, an index of PLACES: int64 [t · h · w].

    A slice shows its second and the next half one. A token belongs to an object whose frame covers at least a quarter
    of it at one of both times.
    """
    found = np.full((grid.t, grid.h, grid.w), PLACES.index("the background"))

    def covered(thing: Thing, time_s: float) -> NDArray[np.bool_]:
        x, y = scene.place_at(thing, time_s)
        across, down = _overlap(x, thing.half, grid.w), _overlap(y, thing.half, grid.h)
        return np.outer(down, across) >= LEAST_COVERED

    for thing in sorted(scene.things, key=lambda each: each.motion is not None):
        for second, half in itertools.product(range(grid.t), (0.0, 0.5)):
            found[second][covered(thing, second + half)] = PLACES.index(
                "the object that moves" if thing.motion else "another object"
            )
    return found.reshape(-1)


def seen(scene: Scene, answer: Answer) -> Seen:
    assert answer.attention
    (item,) = answer.attention.media
    of_kept, weights = places(scene, item.grid)[item.kept], item.weights.reshape(-1)[item.kept]
    shares, tokens = (np.bincount(of_kept, each, len(PLACES)) for each in (weights, np.ones(item.kept.size)))
    right = answer.text.strip() == f"the {scene.movers[0].name}"
    return Seen(right, item.share, shares / shares.sum(), tokens / tokens.sum())


async def looked(address: str, count: int) -> dict[float, list[Seen]]:
    """By pruning rate."""
    found = defaultdict[float, list[Seen]](list)
    async with GridsieveClient(address) as client:
        for scene in scenes(count):
            clip = await asyncio.to_thread(encode, scene)
            for rate in RATES:
                answer = await client.ask(Video(data=clip), QUESTION, pruning_rate=rate, temperature=0, attention=True)
                found[rate].append(seen(scene, answer))
    return found


async def cost(stack: LocalStack, rounds: int) -> dict[bool, float]:
    """Seconds of processors that generation takes for an answer of TOKENS tokens, without and with attention: means."""
    taken, process = {False: 0.0, True: 0.0}, stack.processes["generation"].pid
    async with GridsieveClient(stack.address) as client:
        for number in range(rounds + 2):  # the first two warm up
            for attention in (False, True) if number % 2 else (True, False):
                began_s = _processor_s(process)
                options = Options(max_new_tokens=TOKENS, ignore_eos=True, temperature=0, attention=attention)
                await client.ask(Video(CLIP), QUESTION, **options)
                if number > 1:
                    taken[attention] += (_processor_s(process) - began_s) / rounds
    return taken


def _processor_s(process: int) -> float:
    """Of all threads of a process until now, which other processes of the machine hardly change."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def table(found: Sequence[Seen]) -> Iterator[str]:
    """The rows of one rate: one for right answers, one for wrong answers."""
    for right in (True, False):
        some = [each for each in found if each.right is right]
        if not some:
            continue
        media = statistics.mean(each.media_share for each in some)
        shares, tokens = (np.mean([getattr(each, name) for each in some], axis=0) for name in ("shares", "tokens"))
        for place, share, part in zip(PLACES, shares, tokens, strict=True):
            yield f"{'right' if right else 'wrong'} ({len(some)}) | {media:.1%} | {place} | {share:.1%} | {part:.1%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenes", type=int, default=SCENES)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of the answers that take turns")
    args = parser.parse_args()
    beginning = Beginning.of("attention")
    unwind_on_signals()
    print(beginning)
    with LocalStack() as stack:
        print("| rate | answers | attention on the video | tokens of | of it | of the kept tokens |")
        print("|---|---|---|---|---|---|")
        for rate, several in asyncio.run(looked(stack.address, args.scenes)).items():
            for row in table(several):
                print(f"| {rate:g} | {row} |", flush=True)
        found = asyncio.run(cost(stack, args.rounds))
    without, with_it = (found[attention] * 1e3 for attention in (False, True))
    print(f"\nprocessor time of generation, {TOKENS} tokens: {without:.1f} ms without, {with_it:.1f} ms with")


if __name__ == "__main__":
    main()
