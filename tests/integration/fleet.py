"""Single service processes that tests kill, drain and restart one by one, and the reading of metrics."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import grpc

from gridsieve.cli.launcher import SERVICES
from gridsieve.common.process import free_port
from gridsieve.common.security.credentials import NO_CREDENTIALS, Credentials
from gridsieve.common.serving.probe import is_serving
from tests.awake import awake
from tests.integration.forks import Forked
from tests.processes import children

ROOT = Path(__file__).parents[2]
START_S = 120.0
# Gauges of what requests hold.
HELD = {
    "preprocessing": ("planning_jobs", "jobs", "inflight_used_bytes", "workers_busy"),
    "encoder": ("cache_waiters", "buffer_used_bytes", "buffer_waiting", "queue_slices"),
    "generation": ("engine_requests", "kv_blocks_used", "media_buffer_used_bytes"),
}
# A callback of an event loop is slow from here on, in processor time. A quiet machine needs at most 3 ms for one.
SLOW_MS = 10.0
# Runs a service, which prints the name of each slow callback.
TIMED = f"""
import asyncio.events, re, runpy, time

run = asyncio.events.Handle._run

def timed(handle):
    began = time.thread_time()
    run(handle)
    spent_ms = (time.thread_time() - began) * 1e3
    if spent_ms > {SLOW_MS}:
        task = getattr(handle._callback, "__self__", None)
        work = task.get_coro() if isinstance(task, asyncio.Task) else handle._callback
        print("SLOW", getattr(work, "__qualname__", re.sub(" at 0x\\\\w+", "", repr(work))), flush=True)

asyncio.events.Handle._run = timed
runpy.run_module("gridsieve.services.{{name}}", run_name="__main__", alter_sys=True)
"""


@cache
def media_port() -> int:
    """The port of localhost that the stack and the fleet may fetch from."""
    return free_port()


@dataclass
class Service:
    """One process of a service on a loopback address; `close` kills it.

    program: Python code that runs the service, instead of its module. credentials: of its health check. alone: started
    as users start it, so that its memory is its own.
    """

    name: str
    model: Path
    folder: Path
    flags: tuple[str, ...] = ()
    address: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    metrics_port: int = field(default_factory=free_port)
    program: str | None = None
    process: Forked | subprocess.Popen[bytes] | None = None
    credentials: Credentials = NO_CREDENTIALS
    alone: bool = False

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        return self._started.pid

    @property
    def _started(self) -> Forked | subprocess.Popen[bytes]:
        assert self.process is not None
        return self.process

    def start(self) -> None:
        """Starts the process and returns at once; see `ready`."""
        own = ("--model", str(self.model), "--listen", self.address, "--metrics-port", str(self.metrics_port))
        if not self.alone:
            self.process = Forked(self.name, (*own, *self.flags), self._log, self.program)
            return
        command = [sys.executable, "-m", f"gridsieve.services.{self.name}", *own, *self.flags]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT)

    def ready(self) -> None:
        """Returns once the service answers SERVING. Fails with its log if it ends or takes too long."""
        deadline = time.monotonic() + START_S
        while not self.serving():
            assert self.running, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def serving(self) -> bool:
        """Whether its health check answers SERVING."""
        try:
            return is_serving(self.address, self.credentials, timeout_s=1)
        except grpc.RpcError:
            return False

    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def _log(self) -> Path:
        return self.folder / f"{self.name}-{self.metrics_port}.log"

    def kill(self) -> None:
        """SIGKILL, as if its machine were lost."""
        self.tell(signal.SIGKILL)
        self.ended()

    def tell(self, number: signal.Signals) -> None:
        self._started.send_signal(number)

    def ended(self, within_s: float = 20) -> int:
        """Waits for its end and returns the exit status."""
        return self._started.wait(within_s)

    def close(self) -> None:
        if self.running:
            self.kill()

    def metric(self, name: str, **labels: str) -> float:
        return metric_in(exported(self.metrics_port), name, **labels)

    def in_use(self) -> dict[str, float]:
        """The gauges of resources held by requests that are not 0."""
        text = exported(self.metrics_port)
        names = ["gridsieve_requests_running", *(f"gridsieve_{self.name}_{held}" for held in HELD[self.name])]
        return {name: value for name in names if (value := metric_in(text, name))}


@contextmanager
def started(*services: Service) -> Iterator[None]:
    """Inside, the services serve; at the end they are killed."""
    try:
        for each in services:
            each.start()
        for each in services:
            each.ready()
        yield
    finally:
        for each in services:
            each.close()


@dataclass(frozen=True)
class Stack:
    """Services that call each other."""

    services: Mapping[str, Service]

    @property
    def address(self) -> str:
        """The address of generation, which clients call."""
        return self.services["generation"].address

    @property
    def addresses(self) -> dict[str, str]:
        return {name: each.address for name, each in self.services.items()}

    @property
    def metrics_ports(self) -> dict[str, int]:
        return {name: each.metrics_port for name, each in self.services.items()}

    def log(self, name: str) -> str:
        """The output of a service so far."""
        return self.services[name].log()


@contextmanager
def running(
    model: Path,
    media_root: Path | None = None,
    flags: Mapping[str, Sequence[str]] | None = None,
    alone: bool = False,
) -> Iterator[Stack]:
    """The three services, on sockets of a folder of their own. They are killed at the end. flags: by service. alone: as
    of `Service`."""
    flags, services = flags or {}, dict[str, Service]()
    with tempfile.TemporaryDirectory(prefix="gridsieve-") as folder:
        for name in SERVICES:
            own = [flag for other, each in services.items() for flag in (f"--{other}", each.address)]
            own += ["--media-root", str(media_root)] if media_root and name == "preprocessing" else []
            own += flags.get(name, ())
            address = f"unix:{folder}/{name}.sock"
            services[name] = Service(name, model, Path(folder), tuple(own), address, alone=alone)
        with started(*services.values()):
            yield Stack(services)


@contextmanager
def stopped_workers(*preprocessing: Service) -> Iterator[None]:
    """Inside, the worker processes that read and decode media are stopped (SIGSTOP), so their jobs do not finish."""
    workers = [worker for each in preprocessing for worker in children(each.pid)]
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in workers:
            with suppress(ProcessLookupError):  # a worker whose job was cancelled was replaced
                os.kill(worker, signal.SIGCONT)


@dataclass
class Fleet:
    """One generation service over two preprocessing and two encoder replicas. Tests start the second ones if needed.

    fetch_port: the port of localhost that preprocessing may fetch from.
    """

    preprocessing: tuple[Service, Service]
    encoder: tuple[Service, Service]
    generation: Service
    fetch_port: int

    @property
    def first(self) -> tuple[Service, Service, Service]:
        return self.preprocessing[0], self.encoder[0], self.generation

    def start(self, *services: Service) -> None:
        """Starts those that do not run yet and returns once they are ready."""
        ended = [each for each in services if not each.running]
        for each in ended:
            each.start()
        for each in ended:
            each.ready()


def exported(metrics_port: int) -> str:
    return exported_at(f"http://127.0.0.1:{metrics_port}/metrics")


def exported_at(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
    return text


def metric_in(text: str, name: str, **labels: str) -> float:
    """The sum over the samples of a metric that have these labels, 0 without samples. The metric must exist."""
    assert f"# HELP {re.sub('_(count|sum)$', '', name)} " in text, f"there is no metric {name}"
    total = 0.0
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            total += float(match[2])
    return total


async def until(condition: Callable[[], object], within_s: float = 30) -> None:
    """Polls a blocking condition in a thread and returns once it holds."""
    with awake() as passed_s:
        while not await asyncio.to_thread(condition):
            assert passed_s() < within_s, f"still not true after {within_s} s"
            await asyncio.sleep(0.02)


async def at_rest(services: Iterable[Service], within_s: float) -> None:
    """Returns once all gauges of held resources are 0. Fails with those that are not after that time."""
    services = tuple(services)
    with awake() as passed_s:
        while held := {each.name: used for each in services if (used := await asyncio.to_thread(each.in_use))}:
            assert passed_s() < within_s, held
            await asyncio.sleep(0.05)
