"""What a pruning rate costs in retrieval: `python -m demo.retrieval`.

Texts about clips that no training used are searched for among these clips, by the cosine of the vectors that the three
services give: a caption of each, and one of its events, such as "a red circle moves left". A text finds a clip if it is
true of it, whichever clip it was made for. At each rate all methods keep as many tokens as EVS does, as in
`demo.evaluate`. The table is Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from demo.clips import EVALUATION_SEEDS, scene_of
from demo.descriptions import Event, caption, first_event, seen_in
from demo.evaluate import Compared, compared, encoded
from demo.scenes import DURATION_S
from gridsieve.cli.launcher import LocalStack
from gridsieve.cli.signals import unwind_on_signals
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Video
from gridsieve.common.checkpoint import DEMO_EMBEDDER
from gridsieve.common.contract.retention import EVS, PIXEL_CHANGE, RANDOM, ItemPruning

CLIPS = 208
RATES = (0.5, 0.75, 0.9)
METHODS = (EVS, PIXEL_CHANGE, RANDOM)
IN_FLIGHT = 16

Vectors = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Retrieved:
    """What one pruning gives: mean cosine to the unpruned vectors, and the shares of texts that find a clip.

    at_1, at_5: of captions, first or among the first five. event_at_1: of events, first.
    """

    pruning: Compared
    kept: float
    cosine: float
    at_1: float
    at_5: float
    event_at_1: float


def told_by(clips: int) -> dict[int, tuple[Event, ...]]:
    """The seeds of evaluation and what their clips show, of clips that show something."""
    seeds = range(EVALUATION_SEEDS, EVALUATION_SEEDS + 2 * clips)
    found = {seed: seen for seed in seeds if (seen := seen_in(scene_of(seed), 0, DURATION_S))}
    return dict(list(found.items())[:clips])


async def measured(
    address: str, told: Mapping[int, Sequence[Event]], rates: Sequence[float], methods: Sequence[str]
) -> list[Retrieved]:
    """What each pruning gives, first none. address: of a generation service with an embedder. told: as of `told_by`."""
    queries = [make(seen) for make in (caption, first_event) for seen in told.values()]
    holds = np.array([[each.holds(seen) for seen in told.values()] for each in queries])
    wanted = compared(rates, methods)
    async with GridsieveClient(address) as client:
        room = asyncio.Semaphore(IN_FLIGHT)

        async def of_text(text: str) -> Vectors:
            async with room:
                return (await client.embed(None, text)).values

        async def of_clip(clip: bytes, seed: int, pruning: ItemPruning) -> tuple[Vectors, int]:
            async with room:
                found = await client.embed(
                    Video(data=clip),
                    pruning_rate=pruning.rate,
                    pruning_method=pruning.method,
                    pruning_seed=seed if pruning.method == RANDOM else None,
                )
            return found.values, found.usage.media[0].num_kept

        asked = np.stack(await asyncio.gather(*(of_text(each.text) for each in queries)))
        shown = []
        with get_context("spawn").Pool(1) as pool:
            files = pool.imap(encoded, told)
            for seed in told:
                clip = await asyncio.to_thread(next, files)
                shown.append(await asyncio.gather(*(of_clip(clip, seed, each.pruning) for each in wanted)))
    vectors = [np.stack([values for values, _ in each]) for each in zip(*shown, strict=True)]
    kept = [float(np.mean([count for _, count in each])) for each in zip(*shown, strict=True)]
    return [
        _retrieved(each, count, asked, found, vectors[0], holds)
        for each, count, found in zip(wanted, kept, vectors, strict=True)
    ]


def _retrieved(
    pruning: Compared,
    kept: float,
    asked: Vectors,
    vectors: Vectors,
    unpruned: Vectors,
    holds: NDArray[np.bool_],
) -> Retrieved:
    order = np.argsort(-asked @ vectors.T, axis=1, kind="stable")
    right = np.take_along_axis(holds, order, axis=1)
    of_captions, of_events = np.split(right, 2)
    return Retrieved(
        pruning,
        kept=kept,
        cosine=float((vectors * unpruned).sum(1).mean()),
        at_1=float(of_captions[:, 0].mean()),
        at_5=float(of_captions[:, :5].any(axis=1).mean()),
        event_at_1=float(of_events[:, 0].mean()),
    )


def table(rows: Sequence[Retrieved]) -> str:
    lines = [
        "| rate | method | tokens | cosine to rate 0 | recall@1 | recall@5 | event@1 |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.pruning.rate:g} | {row.pruning.method} | {row.kept:.0f} | {row.cosine:.3f} | {100 * row.at_1:.1f} % "
        f"| {100 * row.at_5:.1f} % | {100 * row.event_at_1:.1f} % |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_EMBEDDER)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="RATE")
    parser.add_argument("--methods", nargs="+", default=METHODS, metavar="METHOD")
    parser.add_argument("--clips", type=int, default=CLIPS)
    args = parser.parse_args()
    unwind_on_signals()
    with LocalStack(args.model) as stack:
        rows = asyncio.run(measured(stack.address, told_by(args.clips), args.rates, args.methods))
    print(table(rows))


if __name__ == "__main__":
    main()
