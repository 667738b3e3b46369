"""A Ray cluster on loopback, whose nodes tests kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gridsieve.common.process import free_port
from tests.integration.fleet import ROOT
from tests.processes import children

START_S = 180.0  # on a machine whose cores are busy
# Ray takes the machine's own address for 127.0.0.1, and ports for workers that `free_port` may have given to others.
_HEAD = "127.0.0.2"
_PORTS = ("--min-worker-port", "0", "--max-worker-port", "0")
_FLAGS = (*_PORTS, "--object-store-memory", str(80 * 2**20), "--disable-usage-stats", "--include-log-monitor", "false")
# Ray would kill workers where others fill the machine's memory.
_ENVIRONMENT = {"RAY_memory_monitor_refresh_ms": "0", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


@dataclass
class Node:
    """One `ray start`, with all that it starts."""

    process: subprocess.Popen[bytes]
    log: Path

    @property
    def ready(self) -> bool:
        return "Ray runtime started" in self.log.read_text()

    def running(self, module: str) -> set[int]:
        """Its processes that run a module or one below it."""
        return {pid for pid in descendants(self.process.pid) if f"-m\0{module}" in command_line(pid)}

    def kill(self) -> None:
        """SIGKILL to all of its processes, as if its machine were lost."""
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Cluster:
    """nodes: in the order of their start, the head first."""

    folder: Path
    port: int = field(default_factory=free_port)
    nodes: list[Node] = field(default_factory=list)

    def add(self, cpus: int, **resources: float) -> Node:
        first = ["--head", "--port", str(self.port), "--temp-dir", str(self.folder), "--include-dashboard", "false"]
        first += ["--no-monitor", "--ray-client-server-port", str(free_port())]
        place = ["--address", f"{_HEAD}:{self.port}"] if self.nodes else first
        host = f"127.0.0.{2 + len(self.nodes)}"
        command = [f"{sys.prefix}/bin/ray", "start", *place, "--node-ip-address", host, "--num-cpus", str(cpus)]
        command += ["--resources", json.dumps(resources), *_FLAGS, "--block"]
        path = self.folder / f"{len(self.nodes)}.log"
        with path.open("wb") as log:
            self.nodes.append(Node(subprocess.Popen(command, stdout=log, stderr=log, env=self.environment), path))
        return self.nodes[-1]

    @property
    def environment(self) -> dict[str, str]:
        """Of drivers, too."""
        return {**os.environ, **_ENVIRONMENT, "RAY_ADDRESS": f"{_HEAD}:{self.port}"}

    def driver(self, *command: str) -> subprocess.Popen[str]:
        """A program of Python."""
        streams: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([sys.executable, *command], env=self.environment, cwd=ROOT, **streams)


@contextmanager
def cluster(cpus: int) -> Iterator[Cluster]:
    """A cluster of one node with so many cores. All nodes are killed at the end."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # short: of unix sockets
        made = Cluster(Path(folder))
        try:
            head = made.add(cpus)
            deadline = time.monotonic() + START_S
            while not head.ready:
                assert head.process.poll() is None, head.log.read_text()
                assert time.monotonic() < deadline, head.log.read_text()
                time.sleep(0.1)
            yield made
        finally:
            for node in reversed(made.nodes):
                node.kill()


def descendants(process: int) -> set[int]:
    try:
        found = children(process)
    except FileNotFoundError:  # it has ended
        return set()
    return found.union(*map(descendants, found))


def command_line(process: int) -> str:
    """Its arguments, separated by NUL; empty if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""
