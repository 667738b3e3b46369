"""Compares pruning methods by the answers to the same questions: shares with intervals, and paired tests.

Source of the interval: Wilson, JASA 22 (1927). The paired test flips the signs of the differences of whole clips at
random, because the answers about one clip depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from demo.questions import TOPICS
from demo.scenes import KINDS
from gridsieve.common.contract.retention import EVS, NONE, RANDOM

_Z = 1.96
FLIPS = 10_000


@dataclass(frozen=True, slots=True)
class Answered:
    """One question about the clip of a seed. scene, question: their kinds. tokens: of the clip, that were kept."""

    seed: int
    scene: str
    question: str
    tokens: int
    right: bool


@dataclass(frozen=True, slots=True)
class Cell:
    """The answers with one method at one rate; at 0 with none.

    first_s: seconds to the first token of a question that is asked alone; 0: not measured. before: whether the method
    chooses before the tower.
    """

    rate: float
    method: str
    answers: tuple[Answered, ...]
    first_s: float = 0.0
    before: bool = False

    def only(self, wanted: Callable[[Answered], bool]) -> Cell:
        return replace(self, answers=tuple(filter(wanted, self.answers)))

    def of_scene(self, kind: str) -> Cell:
        return self.only(lambda answer: answer.scene == kind)

    @property
    def share(self) -> float:
        return sum(answer.right for answer in self.answers) / len(self.answers)

    @property
    def tokens(self) -> float:
        """The mean over its questions."""
        return sum(answer.tokens for answer in self.answers) / len(self.answers)


def wilson(share: float, asked: int) -> tuple[float, float]:
    """The 95 % interval of a share, which is also valid near 0 and 1."""
    spread = _Z**2 / asked
    middle = (share + spread / 2) / (1 + spread)
    half = _Z / (1 + spread) * math.sqrt(share * (1 - share) / asked + spread / (4 * asked))
    return middle - half, middle + half


def paired_p(one: Cell, other: Cell) -> float:
    """How likely a difference as large is, if both answered each clip equally well; two-sided, at least 1/FLIPS."""
    gains: dict[int, int] = {}
    for mine, theirs in zip(one.answers, other.answers, strict=True):
        if (mine.seed, mine.question) != (theirs.seed, theirs.question):
            raise ValueError("the answers of both must be to the same questions, in the same order")
        gains[mine.seed] = gains.get(mine.seed, 0) + mine.right - theirs.right
    differences: NDArray[np.int64] = np.array([gain for gain in gains.values() if gain], np.int64)
    signs = np.random.default_rng(0).choice((-1, 1), (FLIPS, differences.size))
    as_large = np.abs(signs @ differences) >= abs(differences.sum())
    return float((1 + as_large.sum()) / (1 + FLIPS))


def tables(cells: Sequence[Cell]) -> str:
    """Markdown: all scenes; paired differences; by time, if it was measured; by kind of scene; by topic."""
    clips = len({answer.seed for answer in cells[0].answers})
    parts = [
        f"{len(cells[0].answers)} questions about {clips} clips that were not used in training, for each share.",
        "Share of exact matches, with Wilson's 95 % interval, and the tokens kept:",
        _overall(cells),
        "The interval takes answers about one clip as independent. The paired test does not; its p is of each "
        "comparison by itself.",
        "Difference to dropping at random, and to EVS, in points (p of the paired test over clips); – where the first "
        "keeps more tokens than the second:",
        _differences(cells),
        "By kind of scene, with the interval:",
        _breakdown({kind: [cell.of_scene(kind) for cell in cells] for kind in KINDS}),
        "By what is asked, with the interval:",
        _breakdown({topic: [cell.only(_asks(kinds)) for cell in cells] for topic, kinds in TOPICS.items()}),
    ]
    if all(cell.first_s for cell in cells):
        parts[5:5] = [
            "By the time to the first token of a question asked alone, and the best that a method before the tower "
            "reaches in that time:",
            _by_time(cells),
        ]
    return "\n\n".join(parts)


def _by_time(cells: Sequence[Cell]) -> str:
    """Each method after the tower beside the best before it that takes no longer."""
    rows = []
    for cell in sorted(cells, key=lambda cell: cell.first_s):
        if cell.before:
            continue
        no_slower = [each for each in cells if each.before and each.first_s <= cell.first_s]
        row = [f"{1e3 * cell.first_s:.0f} ms", cell.method, f"{cell.rate:g}", f"{cell.tokens:.0f}", f"{cell.share:.1%}"]
        if no_slower:
            best = max(no_slower, key=lambda each: each.share)
            named = f"{best.method} {best.rate:g}, {1e3 * best.first_s:.0f} ms, {best.share:.1%}"
            row += [named, f"{100 * (best.share - cell.share):+.1f} ({_shown(paired_p(best, cell))})"]
        rows.append([*row, *["–"] * (7 - len(row))])
    heading = ["first token", "method", "rate", "tokens", "exact", "before the tower, as soon", "difference (p)"]
    return _markdown(heading, rows)


def _asks(kinds: Sequence[str]) -> Callable[[Answered], bool]:
    return lambda answer: answer.question in kinds


def _overall(cells: Sequence[Cell]) -> str:
    methods, rates = _methods(cells), _rates(cells)
    unpruned = next(cell for cell in cells if cell.method == NONE)
    rows = [["0", _with_interval(unpruned), *[""] * (len(methods) - 1)]]
    rows += [[f"{rate:g}", *(_with_interval(_cell(cells, rate, method)) for method in methods)] for rate in rates]
    return _markdown(["rate", *methods], rows)


def _with_interval(cell: Cell) -> str:
    low, high = wilson(cell.share, len(cell.answers))
    return f"{cell.share:.1%} ({low:.1%} to {high:.1%}), {cell.tokens:.0f}"


def _differences(cells: Sequence[Cell]) -> str:
    methods = _methods(cells)
    pairs = [(method, other) for other in (RANDOM, EVS) for method in methods if other in methods and method != other]
    rows = []
    for rate in _rates(cells):
        row = [f"{rate:g}"]
        for method, other in pairs:
            mine, theirs = _cell(cells, rate, method), _cell(cells, rate, other)
            fair = mine.tokens < 1.02 * theirs.tokens
            row.append(f"{100 * (mine.share - theirs.share):+.1f} ({_shown(paired_p(mine, theirs))})" if fair else "–")
        rows.append(row)
    return _markdown(["rate", *(f"{method} − {other}" for method, other in pairs)], rows)


def _shown(p: float) -> str:
    return f"{p:.4f}" if p > 1 / FLIPS else f"≤ {1 / FLIPS:.4f}"


def _breakdown(groups: dict[str, list[Cell]]) -> str:
    """groups: all cells, of some of their answers each."""
    asked = {name: cells for name, cells in groups.items() if cells[0].answers}
    rows = []
    for of_groups in zip(*asked.values(), strict=True):
        one = of_groups[0]
        heading = "rate 0" if one.method == NONE else f"{one.method} {one.rate:g}"
        rows.append([heading, *(_percentages(cell) for cell in of_groups)])
    return _markdown(["", *(f"{name}, {len(cells[0].answers)} asked" for name, cells in asked.items())], rows)


def _percentages(cell: Cell) -> str:
    low, high = wilson(cell.share, len(cell.answers))
    return f"{cell.share:.0%} ({100 * low:.0f}–{100 * high:.0f})"


def _cell(cells: Sequence[Cell], rate: float, method: str) -> Cell:
    return next(cell for cell in cells if (cell.rate, cell.method) == (rate, method))


def _methods(cells: Sequence[Cell]) -> list[str]:
    return list(dict.fromkeys(cell.method for cell in cells if cell.method != NONE))


def _rates(cells: Sequence[Cell]) -> list[float]:
    return list(dict.fromkeys(cell.rate for cell in cells if cell.method != NONE))


def _markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
