"""Rows of results: our figure, the other contender's, their ratio and its goal."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

_SCALES = {"s": (1e3, "ms"), "s/token": (1e6, "µs/token"), "bytes": (2**-20, "MiB"), "bytes/s": (2**-20, "MiB/s")}


class Timings:
    """Measurements by contender, one per round."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = defaultdict(list)

    def add(self, contender: str, value: float) -> None:
        self._taken[contender].append(value)

    def median(self, contender: str) -> float:
        return statistics.median(self._taken[contender])


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one run, in `unit`: one of `_SCALES`, which are printed in others, or any, which is printed as it is.

    at_least, at_most: the goal for ours / theirs, if any. note: further observations, printed below the table.
    """

    what: str
    against: str
    ours: float
    theirs: float
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs

    @property
    def met(self) -> bool | None:
        """Whether the goal is met; None without a goal."""
        if self.at_least is None and self.at_most is None:
            return None
        return (self.at_least or 0) <= self.ratio <= (self.at_most or float("inf"))


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as Markdown: a table, and the notes below it."""
    lines = ["| what | ours | against | theirs | ours / theirs | goal | met |", "|---|---|---|---|---|---|---|"]
    for row in rows:
        scale, unit = _SCALES.get(row.unit, (1, row.unit))
        goal = f"≥ {row.at_least:g}" if row.at_least is not None else f"≤ {row.at_most:.3g}" if row.at_most else ""
        met = {True: "yes", False: "no", None: ""}[row.met]
        lines.append(
            f"| {row.what} | {row.ours * scale:.4g} {unit} | {row.against} | {row.theirs * scale:.4g} {unit} | "
            f"{row.ratio:.3g} | {goal} | {met} |"
        )
    notes = [f"- {row.what}: {row.note}" for row in rows if row.note]
    return [*lines, "", *notes] if notes else lines
