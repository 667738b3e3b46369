"""Plots a load: cumulative distributions of latencies, and throughput over time.

matplotlib is the optional extra `plot` and is imported on use.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gridsieve.bench.measure import Record
from gridsieve.bench.report import named
from gridsieve.common.contract.errors import StartupError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from gridsieve.bench.run import Phase

_MAX_BINS = 60


def check_plotting() -> None:
    """Raises StartupError if matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise StartupError("--plot needs matplotlib, which is not installed: pip install 'gridsieve[plot]'")


def plot(phases: Sequence[Phase], title: str, output: Path) -> None:
    """Writes a PNG, whatever the suffix of `output`. Raises OSError if it cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    first, total, rate = figure.subplots(1, 3)
    figure.suptitle(title, fontsize=10)
    _distributions(first, phases, "time to first token", lambda record: record.first_token_s)
    _distributions(total, phases, "end to end", lambda record: record.total_s)
    _throughput(rate, phases)
    figure.savefig(output, format="png", dpi=120)


def _distributions(axes: Axes, phases: Sequence[Phase], title: str, read: Callable[[Record], float | None]) -> None:
    for phase in phases:
        values = [read(record) for record in phase.records if record.failure is None]
        if seen := [value for value in values if value is not None]:
            axes.ecdf(seen, label=named(phase.pruning))
    axes.set(title=title, xlabel="seconds", ylabel="fraction of requests", ylim=(0, 1))
    axes.set_xlim(left=0)
    _finished(axes)


def _throughput(axes: Axes, phases: Sequence[Phase]) -> None:
    """Requests per second that ended in each of up to 60 equal intervals."""
    for phase in phases:
        edges = np.linspace(0, max(phase.wall_s, 1e-9), min(_MAX_BINS, max(1, len(phase.records) // 8)) + 1)
        for words, failed in (("", False), (", failed", True)):
            done = [record.done_s for record in phase.records if (record.failure is not None) is failed]
            if done:
                counts, _ = np.histogram(done, edges)
                axes.stairs(counts / np.diff(edges), edges, label=f"{named(phase.pruning)}{words}")
    axes.set(title="throughput over time", xlabel="seconds since the load began", ylabel="requests/s")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    _finished(axes)


def _finished(axes: Axes) -> None:
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right")
