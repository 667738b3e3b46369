"""Services as processes of their own on addresses that stay theirs: started, killed, replaced, and any number of each.

Where the launcher runs one stack from its start to its end, tests of failures end single processes and start others.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from common.process import free_port
from common.security.credentials import NO_CREDENTIALS
from common.serving.probe import is_serving
from tests.awake import awake

ROOT = Path(__file__).parents[2]
START_S = 120.0
READ_S = 30.0


def children(process: int) -> set[int]:
    found: set[int] = set()
    for task in Path(f"/proc/{process}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # each reading of metrics is a thread that ends
            found.update(map(int, (task / "children").read_text().split()))
    return found


def runs(process: int) -> bool:
    try:
        status = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter where it went since the file was opened
        return False
    return status.rsplit(")", 1)[1].split()[0] != "Z"


@dataclass
class Service:
    """One process of a service, on a loopback address, with what it was told by flags; killed by `close`.

    program: what it runs, if not the service as it is.
    """

    name: str
    model: Path
    folder: Path
    flags: tuple[str, ...] = ()
    address: str = field(default_factory=lambda: f"127.0.0.1:{free_port()}")
    metrics_port: int = field(default_factory=free_port)
    program: str | None = None
    process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Returns at once; see `ready`."""
        command = [
            sys.executable,
            *(("-m", f"services.{self.name}") if self.program is None else ("-c", self.program)),
            *("--model", str(self.model), "--listen", self.address, "--metrics-port", str(self.metrics_port)),
            *self.flags,
        ]
        with (self.folder / f"{self.name}-{self.metrics_port}.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT)

    def ready(self) -> None:
        deadline = time.monotonic() + START_S
        while not self.serving():
            assert self.process is not None
            assert self.process.poll() is None, self.log()
            assert time.monotonic() < deadline, self.log()
            time.sleep(0.05)

    def serving(self) -> bool:
        """What its health says; False where nobody answers."""
        try:
            return is_serving(self.address, NO_CREDENTIALS, timeout_s=1)
        except grpc.RpcError:
            return False

    def log(self) -> str:
        return (self.folder / f"{self.name}-{self.metrics_port}.log").read_text(errors="replace")

    def kill(self) -> None:
        """As a machine that is lost."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def tell(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def ended(self, within_s: float = 20) -> int:
        """Its exit status, once it has ended."""
        assert self.process is not None
        return self.process.wait(within_s)

    def close(self) -> None:
        if self.running:
            self.kill()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry `labels`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=READ_S) as answer:
            return metric_in(answer.read().decode(), name, **labels)

    def in_use(self) -> dict[str, float]:
        """What requests hold here, by the names of the gauges that are not at rest."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=READ_S) as answer:
            text = answer.read().decode()
        held = {name: metric_in(text, name) for name in ("framesieve_requests_running", *HELD[self.name])}
        return {name: value for name, value in held.items() if value}


@contextmanager
def stopped_workers(*preprocessing: Service) -> Iterator[None]:
    """Inside, the processes that read and decode for these services stand still: what needs one is held there."""
    workers = [worker for each in preprocessing for worker in children(each.pid)]
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)
    try:
        yield
    finally:
        for worker in workers:
            with suppress(ProcessLookupError):  # those that did not stop when told to were replaced
                os.kill(worker, signal.SIGCONT)


@dataclass
class Fleet:
    """One generation over replicas, of which the first of each is started, and the second where a test wants it.

    fetch_port: where on this machine preprocessing may fetch from, by the name localhost.
    """

    preprocessing: tuple[Service, Service]
    encoder: tuple[Service, Service]
    generation: Service
    fetch_port: int

    @property
    def first(self) -> tuple[Service, Service, Service]:
        return self.preprocessing[0], self.encoder[0], self.generation

    @property
    def second(self) -> tuple[Service, Service]:
        return self.preprocessing[1], self.encoder[1]

    def start(self, *services: Service) -> None:
        """Returns once these, of which some may run already, are ready."""
        ended = [each for each in services if not each.running]
        for each in ended:
            each.start()
        for each in ended:
            each.ready()


HELD = {
    "preprocessing": (
        "framesieve_preprocessing_planning_jobs",
        "framesieve_preprocessing_jobs",
        "framesieve_preprocessing_inflight_used_bytes",
        "framesieve_preprocessing_workers_busy",
    ),
    "encoder": (
        "framesieve_encoder_cache_waiters",
        "framesieve_encoder_room_used_bytes",
        "framesieve_encoder_room_waiting",
        "framesieve_encoder_queue_slices",
    ),
    "generation": (
        "framesieve_generation_engine_requests",
        "framesieve_generation_kv_blocks_used",
        "framesieve_generation_media_buffer_used_bytes",
    ),
}


def metric_in(text: str, name: str, **labels: str) -> float:
    """0 where there are no samples yet. The metric must exist."""
    assert f"# HELP {name.removesuffix('_count')} " in text, f"there is no metric {name}"
    total = 0.0
    for line in text.splitlines():
        match = re.fullmatch(rf"{name}(?:\{{(.*)\}})? (\S+)", line)
        if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
            total += float(match[2])
    return total


async def until(condition: Callable[[], object], within_s: float = 30) -> None:
    """Returns once the condition, which may take its time, holds."""
    with awake() as passed_s:
        while not await asyncio.to_thread(condition):
            assert passed_s() < within_s, "it never happened"
            await asyncio.sleep(0.02)


async def at_rest(services: Iterable[Service], within_s: float) -> None:
    """Returns once nobody holds anything; fails with what is still held after that time."""
    services = tuple(services)
    with awake() as passed_s:
        while held := {each.name: used for each in services if (used := await asyncio.to_thread(each.in_use))}:
            assert passed_s() < within_s, held
            await asyncio.sleep(0.05)
