"""A run of the load generator: its target, and for each pruning rate a warm-up and a load.

The rates are measured one after another, each alone, with the same questions at the same times. Ctrl-C ends the run
early and keeps its records.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gridsieve.bench.load import closed_loop, open_loop, poisson_arrivals
from gridsieve.bench.measure import Record, timed
from gridsieve.bench.metrics import Spent, read_metrics, spent
from gridsieve.bench.model import DESCRIPTION, FLAGS, write_model
from gridsieve.bench.workload import Workload
from gridsieve.cli.launcher import SERVICES, LocalStack, check_packages, listens
from gridsieve.cli.signals import unwind_on_signals
from gridsieve.cli.terminal import stderr
from gridsieve.client.client import DEFAULT_ADDRESS, GridsieveClient
from gridsieve.client.credentials import Access
from gridsieve.client.prompt import Options, Pruning
from gridsieve.common.contract.errors import Unavailable

_WARMUP_CLIENTS = 8


@dataclass(frozen=True, slots=True)
class Target:
    """Generation's address, its description in the report, and host:port of the services' /metrics; if there are none,
    the run reports no costs."""

    address: str
    description: str
    metrics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """What to send, when and to which server. Exactly one of clients and rate (requests per second) is set.

    prunings: at least one; each is measured alone.
    requests, warmup: of each pruning.
    """

    target: Target
    workload: Workload
    prunings: tuple[Pruning, ...]
    clients: int | None
    rate: float | None
    requests: int
    warmup: int
    options: Options
    access: Access

    @property
    def load(self) -> str:
        """A description of the load, for the report."""
        when = f"{self.clients} clients in a closed loop"
        if self.rate is not None:
            when = f"{self.rate:g} Poisson arrivals a second"
        return f"{when}, {self.requests} requests"


@dataclass(slots=True)
class Phase:
    """The load at one pruning: its records, in order of completion.

    wall_s: from the start of the load to its last completion, or to its interruption.
    spent: the cost to each service; empty if the load was interrupted.
    """

    pruning: Pruning
    records: list[Record] = field(default_factory=list)
    wall_s: float = 0.0
    spent: tuple[Spent, ...] = ()


@dataclass(slots=True)
class Outcome:
    """The results of a run.

    phases: those that began, in order.
    warmup_failed: failed warm-up requests, of all phases.
    abandoned: requests that were running when the load was interrupted; they have no record.
    """

    phases: list[Phase] = field(default_factory=list)
    warmup_failed: int = 0
    interrupted: bool = False
    abandoned: int = 0


@contextlib.contextmanager
def served(server: str | None, start: bool, model: Path | None, metrics: Sequence[str]) -> Iterator[Target]:
    """The server to measure: the given one, the one at the default address, or services started for this run.

    Without a model of the caller's, they have one of random weights (`gridsieve.bench.model`).

    Services that were started are stopped when the context is left. Raises StartupError if they cannot start.
    """
    if server is not None or not (start or model is not None or not listens(DEFAULT_ADDRESS)):
        address = server or DEFAULT_ADDRESS
        yield Target(address, address, tuple(metrics))
        return
    unwind_on_signals()
    check_packages(SERVICES)
    own = model or os.environ.get("GRIDSIEVE_MODEL")  # which the services read
    with contextlib.ExitStack() as stack:
        if own is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gridsieve-"))
            with stderr.status("drawing a model's weights …"):
                write_model(Path(folder))
            model = Path(folder)
        services = LocalStack(model, flags=FLAGS if own is None else {}, report=stderr.print)
        with stderr.status("starting three services …"):
            stack.enter_context(services)
        description = f"three services started for this run, with {own or DESCRIPTION}"
        metrics = tuple(f"127.0.0.1:{port}" for port in services.metrics_ports.values())
        yield Target(services.address, description, metrics)


async def measure(run: Run) -> Outcome:
    """Executes a run. Raises Unavailable if no warm-up request reaches the server, or metrics cannot be read."""
    outcome = Outcome()
    load = asyncio.create_task(_load(run, outcome))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, load.cancel)
    try:
        await asyncio.wait([load])
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        load.cancel()
    outcome.interrupted = load.cancelled()
    if not outcome.interrupted:
        load.result()
    return outcome


async def _load(run: Run, outcome: Outcome) -> None:
    async with GridsieveClient(run.target.address, **run.access) as client:
        for pruning in run.prunings:
            await _measure_one(run, pruning, client, outcome)


async def _measure_one(run: Run, pruning: Pruning, client: GridsieveClient, outcome: Outcome) -> None:
    if run.warmup:
        with stderr.status(f"warming up: {run.warmup} requests …"):
            outcome.warmup_failed += await _warm_up(run, pruning, client)
    before = await read_metrics(run.target.metrics)
    phase = Phase(pruning)
    outcome.phases.append(phase)
    clock = asyncio.get_running_loop().time
    began_s = clock()

    async def ask(number: int, due_s: float) -> None:
        outcome.abandoned += 1
        phase.records.append(await timed(client, number, run.workload, pruning, due_s, began_s, run.options))
        outcome.abandoned -= 1
        bar.advance(done)

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stderr, transient=True, disable=not stderr.is_terminal) as bar:
        done = bar.add_task("requests", total=run.requests)
        try:
            if run.rate is None:
                await closed_loop(ask, run.clients or 1, run.requests)
            else:
                await open_loop(ask, poisson_arrivals(run.rate, run.requests))
        finally:
            phase.wall_s = clock() - began_s
    phase.spent = spent(before, await read_metrics(run.target.metrics))


async def _warm_up(run: Run, pruning: Pruning, client: GridsieveClient) -> int:
    """The number of failed requests."""
    records: list[Record] = []

    async def ask(number: int, due_s: float) -> None:
        records.append(await timed(client, number, run.workload, pruning, due_s, due_s, run.options))

    await closed_loop(ask, run.clients or _WARMUP_CLIENTS, run.warmup)
    failures = [record.failure for record in records if record.failure]
    if all(record.failure and record.failure.reason == Unavailable.reason for record in records):
        raise Unavailable(failures[0].message, "generation")
    return len(failures)
