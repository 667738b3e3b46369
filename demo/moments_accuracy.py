"""How right moments of unseen clips are, with and without their grammar: `python -m demo.moments_accuracy`.

The three services answer one question about each clip, greedy, at each rate: as `moments` and as plain text, of which
the first JSON list is read. Clips are as long as those of the lessons, or shorter: then a model may tell times that the
video does not have. A clip is left out where a move is cut off. The last row judges the lessons' own answers, whose
times are the nearest of the slices' (`demo.moves`). The tables are Markdown.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

from demo.clips import EVALUATION_SEEDS, scene_of
from demo.comparison import wilson
from demo.drawing import encode
from demo.moments import MOMENTS_MODEL
from demo.moves import ASKED, Judged, answer_of, judged, moves_of, told_by
from demo.scenes import DURATION_S, Scene
from gridsieve.cli.launcher import LocalStack
from gridsieve.cli.signals import unwind_on_signals
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Video

CLIPS = 200
RATES = (0.0, 0.75)
LASTS_S = (DURATION_S, DURATION_S // 2)
CLIPS_IN_FLIGHT = 24
# Above the tokens of three moments.
MAX_TOKENS = 250
COLUMNS = ("readable", "times of the clip", "within a slice", "IoU ≥ 0.5", "within a slice, and described")


@dataclass(frozen=True, slots=True)
class Row:
    """The answers of one kind about all clips of one length. answered: how, `grammar`, `text` or `lesson`."""

    lasts_s: int
    rate: float
    answered: str
    scenes: Sequence[Scene]
    answers: Sequence[Judged]


def scenes_of(lasts_s: int) -> Iterator[Scene]:
    """Scenes of evaluation that last so long, and whose moves are whole, for ever."""
    seed = EVALUATION_SEEDS
    while True:
        scene = replace(scene_of(seed), duration_s=lasts_s)
        if all(move.end_s <= lasts_s for move in moves_of(scene)):
            yield scene
        seed += 1


async def asked(client: GridsieveClient, clip: bytes, scene: Scene, rate: float, *, grammar: bool) -> Judged:
    """Of the first wording of the lessons; tokens are dropped by the default method."""
    answer = await client.ask(Video(data=clip), ASKED[0], pruning_rate=rate, moments=grammar, max_new_tokens=MAX_TOKENS)
    return judged(told_by(answer.text), scene)


async def measured(model: Path, clips: int, lasts_s: Sequence[int], rates: Sequence[float]) -> list[Row]:
    ways, rows = [(rate, grammar) for rate in rates for grammar in (True, False)], list[Row]()
    with get_context("spawn").Pool(1) as pool:
        async with LocalStack(model) as stack, GridsieveClient(stack.address) as client:
            places = asyncio.Semaphore(CLIPS_IN_FLIGHT)

            async def answers(clip: bytes, scene: Scene) -> list[Judged]:
                async with places:
                    return [await asked(client, clip, scene, rate, grammar=grammar) for rate, grammar in ways]

            for each_s in lasts_s:
                scenes = [*islice(scenes_of(each_s), clips)]
                files = pool.imap(encode, scenes)
                running = [
                    asyncio.create_task(answers(await asyncio.to_thread(next, files), scene)) for scene in scenes
                ]
                found = await asyncio.gather(*running)
                rows += [
                    Row(each_s, rate, "grammar" if grammar else "text", scenes, each)
                    for (rate, grammar), each in zip(ways, zip(*found, strict=True), strict=True)
                ]
                lessons = [judged(told_by(answer_of(scene)), scene) for scene in scenes]
                rows.append(Row(each_s, 0.0, "lesson", scenes, lessons))
    return rows


def table(rows: Sequence[Row]) -> str:
    """The shares of answers of which each is right, with the 95 % interval; then those within a slice, by moves."""
    lines = [f"| clips | rate | answer | {' | '.join(COLUMNS)} |", "|---" * (3 + len(COLUMNS)) + "|"]
    by_moves = ["| clips | rate | answer | no move | one | several |", "|---" * 6 + "|"]
    for row in rows:
        begins = f"| {len(row.answers)} of {row.lasts_s} s | {row.rate:g} | {row.answered} |"
        shares = [_share(each) for each in zip(*(astuple(answer) for answer in row.answers), strict=True)]
        lines.append(f"{begins} {' | '.join(shares)} |")
        groups: list[list[bool]] = [[], [], []]
        for scene, answer in zip(row.scenes, row.answers, strict=True):
            groups[min(2, len(moves_of(scene)))].append(answer.near)
        counted = [f"{_share(each)} of {len(each)}" if each else "–" for each in groups]
        by_moves.append(f"{begins} {' | '.join(counted)} |")
    return "\n".join([*lines, "", "Within a slice, by the number of moves:", "", *by_moves])


def _share(rights: Sequence[bool]) -> str:
    share = sum(rights) / len(rights)
    low, high = wilson(share, len(rights))
    return f"{100 * share:.1f} % ({abs(100 * low):.0f}–{100 * high:.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MOMENTS_MODEL)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, metavar="RATE")
    parser.add_argument("--clips", type=int, default=CLIPS, help="of each length")
    parser.add_argument("--lasts-s", type=int, nargs="+", default=LASTS_S, metavar="S", help="lengths of the clips")
    args = parser.parse_args()
    unwind_on_signals()
    print(table(asyncio.run(measured(args.model, args.clips, args.lasts_s, args.rates))))


if __name__ == "__main__":
    main()
