"""A whole run: warm-up, load, and Ctrl-C, which ends it early and keeps what was measured."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from common.contract.errors import Unavailable
from framesieve.bench.load import Extent, closed_loop, open_loop, poisson_arrivals
from framesieve.bench.measure import Record, timed
from framesieve.bench.metrics import Spent, read_metrics, spent
from framesieve.bench.workload import Workload
from framesieve.cli.launcher import LocalStack, listens
from framesieve.cli.signals import unwind_on_signals
from framesieve.cli.terminal import stderr
from framesieve.client.client import DEFAULT_ADDRESS, FramesieveClient
from framesieve.client.credentials import Access
from framesieve.client.prompt import Options

_WARMUP_CLIENTS = 8


@dataclass(frozen=True, slots=True)
class Run:
    """What is asked, when, of whom. Exactly one of clients and rate (questions a second) is set.

    metrics: addresses of the services' /metrics; without them nobody says what the load cost.
    """

    server: str
    workload: Workload
    clients: int | None
    rate: float | None
    extent: Extent
    warmup: int
    seed: int
    options: Options
    access: Access
    metrics: tuple[str, ...] = ()

    @property
    def load(self) -> str:
        """In words."""
        when = f"{self.clients} clients in a closed loop"
        if self.rate is not None:
            when = f"{self.rate:g} Poisson arrivals a second, seed {self.seed}"
        if self.extent.requests is not None:
            return f"{when}, {self.extent.requests} requests"
        return f"{when}, all that begin within {self.extent.duration_s:g} s"


@dataclass(slots=True)
class Outcome:
    """What became of a run: its records, in the order in which they ended, and of its warm-up how many failed.

    wall_s: from the load's begin to its last answer, or to its interruption.
    abandoned: questions that were under way when it was interrupted; they have no record.
    spent: by the services, on a load that was not interrupted.
    """

    records: list[Record] = field(default_factory=list)
    warmup_failed: int = 0
    wall_s: float = 0.0
    interrupted: bool = False
    abandoned: int = 0
    spent: tuple[Spent, ...] = ()


@dataclass(frozen=True, slots=True)
class Target:
    """Generation's address, what the report says of it, and the addresses of the services' /metrics."""

    address: str
    told: str
    metrics: tuple[str, ...]


@contextlib.contextmanager
def served(server: str | None, start: bool, model: Path | None, metrics: Sequence[str]) -> Iterator[Target]:
    """Services are there until the context is left; what was started is stopped then. Raises StartupError."""
    if server is not None or not (start or model is not None or not listens(DEFAULT_ADDRESS)):
        address = server or DEFAULT_ADDRESS
        yield Target(address, address, tuple(metrics))
        return
    unwind_on_signals()
    stack = LocalStack(model)
    with stderr.status("starting three services …"):
        stack.start()
    try:
        told = f"three services started for this run, {model or 'the embedded model'}"
        yield Target(stack.address, told, tuple(f"127.0.0.1:{port}" for port in stack.metrics_ports.values()))
    finally:
        stack.stop()


async def measure(run: Run) -> Outcome:
    """Raises Unavailable where all of the warm-up finds no server, or nobody tells metrics."""
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
    async with FramesieveClient(run.server, **run.access) as client:
        if run.warmup:
            with stderr.status(f"warming up: {run.warmup} requests …"):
                await _warm_up(run, client, outcome)
        before = await read_metrics(run.metrics)
        clock = asyncio.get_running_loop().time
        began_s = clock()

        async def ask(number: int, due_s: float) -> None:
            outcome.abandoned += 1
            question = run.workload.question(number)
            outcome.records.append(await timed(client, number, question, due_s, began_s, run.options))
            outcome.abandoned -= 1
            bar.advanced(outcome, clock() - began_s)

        with LoadBar(run.extent) as bar:
            try:
                if run.rate is None:
                    await closed_loop(ask, run.clients or 1, run.extent)
                else:
                    await open_loop(ask, poisson_arrivals(run.rate, run.seed, run.extent))
            finally:
                outcome.wall_s = clock() - began_s
        outcome.spent = spent(before, await read_metrics(run.metrics))


async def _warm_up(run: Run, client: FramesieveClient, outcome: Outcome) -> None:
    records: list[Record] = []

    async def ask(number: int, due_s: float) -> None:
        records.append(await timed(client, number, run.workload.question(number), due_s, due_s, run.options))

    await closed_loop(ask, run.clients or _WARMUP_CLIENTS, Extent(run.warmup))
    failures = [record.failure for record in records if record.failure]
    outcome.warmup_failed = len(failures)
    if all(record.failure and record.failure.reason == Unavailable.reason for record in records):
        raise Unavailable(failures[0].message, "generation")


class LoadBar:
    """A bar on a terminal's stderr: questions done and failed, and how many a second."""

    def __init__(self, extent: Extent) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[told]}"))
        self._extent = extent
        self._failed = 0
        self._bars = Progress(
            *columns, TimeElapsedColumn(), console=stderr, transient=True, disable=not stderr.is_terminal
        )
        self._task = self._bars.add_task("asking", total=extent.requests or extent.duration_s, told="0 done")

    def __enter__(self) -> LoadBar:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def advanced(self, outcome: Outcome, after_s: float) -> None:
        """One more question has ended, the last of the outcome's records, this long after the load's begin."""
        done = len(outcome.records)
        self._failed += outcome.records[-1].failure is not None
        told = f"{done} done · {self._failed} failed · {done / max(after_s, 1e-9):.1f} requests/s"
        self._bars.update(self._task, completed=done if self._extent.requests else after_s, told=told)
