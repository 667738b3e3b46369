"""A Ray cluster on loopback: a head that computes nothing, and nodes that tests kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from gridsieve.common.process import free_port
from tests.integration.fleet import ROOT
from tests.processes import children

_HOST = "127.0.0.1"
_QUIET = ("--disable-usage-stats", "--object-store-memory", str(80 * 2**20), "--block")
# Nodes share the memory of this machine, which other tests fill; node loss is noticed after 3 s instead of 25.
_ENVIRONMENT = {
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
    "PYTHONPATH": str(ROOT),
}


@dataclass
class Node:
    """One `ray start`, with all that it starts."""

    process: subprocess.Popen[bytes]

    @property
    def processes(self) -> set[int]:
        return descendants(self.process.pid)

    def kill(self) -> None:
        """SIGKILL to all of its processes, as if its machine were lost."""
        for pid in {self.process.pid, *self.processes}:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Cluster:
    """nodes: in the order of their start, the head first."""

    folder: Path
    port: int = field(default_factory=free_port)
    nodes: list[Node] = field(default_factory=list)

    def add(self, cpus: int) -> Node:
        place = ("--address", f"{_HOST}:{self.port}")
        if not self.nodes:
            place = ("--head", "--port", str(self.port), "--include-dashboard", "false", "--temp-dir", str(self.folder))
        flags = ("--node-ip-address", _HOST, "--num-cpus", str(cpus), *place, *_QUIET)
        command = [f"{sys.prefix}/bin/ray", "start", *flags]
        with (self.folder / "nodes.log").open("ab") as log:
            self.nodes.append(Node(subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)))
        return self.nodes[-1]

    @property
    def environment(self) -> dict[str, str]:
        """Of drivers, too."""
        return {**os.environ, **_ENVIRONMENT, "RAY_ADDRESS": f"{_HOST}:{self.port}"}

    def driver(self, *command: str) -> subprocess.Popen[str]:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        return subprocess.Popen([sys.executable, *command], env=self.environment, cwd=ROOT, **streams)


@contextmanager
def cluster(cpus: Sequence[int]) -> Iterator[Cluster]:
    """Nodes with so many cores each, which are killed at the end."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # short: of unix sockets
        made = Cluster(Path(folder))
        try:
            for each in cpus:
                made.add(each)
            yield made
        finally:
            for node in reversed(made.nodes):
                node.kill()


def descendants(process: int) -> set[int]:
    found = children(process)
    return found.union(*map(descendants, found))
