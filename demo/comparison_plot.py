"""Draws a comparison: accuracy over tokens kept, a line for each method, a panel for each kind of scene; and accuracy
over the time to the first token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from demo.comparison import Cell, wilson
from demo.scenes import KINDS
from gridsieve.common.contract.retention import EVS, NONE

COLUMNS = 4


def draw(cells: Sequence[Cell], path: Path) -> None:
    """Write a PNG file."""
    there = {answer.scene for answer in cells[0].answers}
    kinds = ["all", *(kind for kind in KINDS if kind in there)]
    rows = math.ceil(len(kinds) / COLUMNS)
    figure = Figure(figsize=(3.2 * COLUMNS, 2.6 * rows), layout="constrained")
    panels = figure.subplots(rows, COLUMNS, squeeze=False, sharex=True, sharey=True).flat
    for kind, panel in zip(kinds, panels, strict=False):
        _panel(panel, cells if kind == "all" else [cell.of_scene(kind) for cell in cells])
        panel.set_title(kind, fontsize=10)
    for panel in list(panels)[len(kinds) :]:
        panel.axis("off")
    figure.supxlabel("tokens kept of a clip", fontsize=9)
    figure.supylabel("exact match", fontsize=9)
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize=9)
    figure.savefig(path, dpi=110)


def draw_times(cells: Sequence[Cell], path: Path) -> None:
    """Write a PNG file."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    panel = figure.subplots()
    for method in dict.fromkeys(cell.method for cell in cells):
        own = sorted((cell for cell in cells if cell.method == method), key=lambda cell: cell.first_s)
        width = 2.2 if own[0].before else 1.0
        label = "not pruned" if method == NONE else method
        times, shares = [1e3 * cell.first_s for cell in own], [cell.share for cell in own]
        panel.plot(times, shares, label=label, marker="o", markersize=3, linewidth=width)
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    panel.grid(alpha=0.25)
    panel.legend(fontsize=8)
    figure.supxlabel("milliseconds to the first token", fontsize=9)
    figure.supylabel("exact match", fontsize=9)
    figure.savefig(path, dpi=110)


def _panel(panel: Any, cells: Sequence[Cell]) -> None:
    unpruned = next(cell for cell in cells if cell.method == NONE)
    panel.axhline(unpruned.share, color="grey", linestyle=":", linewidth=1, label="not pruned")
    for method in dict.fromkeys(cell.method for cell in cells if cell.method != NONE):
        own = sorted((cell for cell in cells if cell.method == method), key=lambda cell: cell.tokens)
        intervals = [wilson(cell.share, len(cell.answers)) for cell in own]
        tokens = [cell.tokens for cell in own]
        (line,) = panel.plot(tokens, [cell.share for cell in own], marker="o", markersize=3, label=method)
        panel.fill_between(tokens, *zip(*intervals, strict=True), color=line.get_color(), alpha=0.1, linewidth=0)
    panel.set_xscale("log", base=2)
    ticks = sorted({round(cell.tokens) for cell in cells if cell.method in (NONE, EVS)})
    panel.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=7, rotation=60)
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(PercentFormatter(1.0))
    panel.grid(alpha=0.25)
