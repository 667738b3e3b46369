"""Draws what `make bench-peers` measured: tokens a second and the time to the first token, of each contender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.figures import Figures, Measured


def draw(measured: Sequence[Measured], path: Path) -> None:
    """A row of panels for each dtype: tokens/s with every number of clients, then the first token of one client."""
    from matplotlib.figure import Figure  # slow to import

    dtypes = list(dict.fromkeys(each.dtype for each in measured))
    clients = sorted({row.clients for each in measured for row in each.figures})
    figure = Figure(figsize=(3.2 * (len(clients) + 1), 2.8 * len(dtypes)), layout="constrained")
    panels = figure.subplots(len(dtypes), len(clients) + 1, squeeze=False)
    for dtype, row in zip(dtypes, panels, strict=True):
        own = [each for each in measured if each.dtype == dtype]
        for number, panel in zip(clients, row, strict=False):
            _bars(panel, own, number, lambda figures: figures.tokens_per_s)
            panel.set_title(f"{dtype}, {number} client{'s' * (number > 1)}: tokens/s", fontsize=9)
        _bars(row[-1], own, 1, lambda figures: 1e3 * figures.first_token_s)
        row[-1].set_title(f"{dtype}, 1 client: first token, ms", fontsize=9)
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)


def _bars(panel: Any, measured: Sequence[Measured], clients: int, value: Callable[[Figures], float]) -> None:
    names = list(dict.fromkeys(row.contender for each in measured for row in each.figures))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        found = [
            (index, value(row))
            for index, each in enumerate(measured)
            for row in each.figures
            if (row.contender, row.clients) == (name, clients)
        ]
        panel.bar([index + (place + 0.5) * width - 0.4 for index, _ in found], [y for _, y in found], width, label=name)
    panel.set_xticks(range(len(measured)), [f"rate {each.rate:g}" for each in measured], fontsize=8)
