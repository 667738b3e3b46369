"""Services that start in a moment: they are forked from a process that has imported the packages of them all.

test_serve.py starts services as users do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

from gridsieve.common.serving.server import run

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.integration.preloaded"])


class Forked:
    """A service; what tests use of `Popen`."""

    def __init__(self, name: str, flags: Sequence[str], log: Path, program: str | None) -> None:
        """program: Python code that runs the service, instead of its module."""
        arguments = (name, tuple(flags), log, program, dict(os.environ))
        self._process = _FORKS.Process(target=_run, args=arguments, daemon=True)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        status = self._process.exitcode
        if status is None:
            raise TimeoutError(f"the process still runs after {timeout} s")
        return status

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _run(name: str, flags: Sequence[str], log: Path, program: str | None, environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    threading.Thread(target=_end_with_tests, daemon=True).start()
    with log.open("ab") as output:
        for standard in (1, 2):
            os.dup2(output.fileno(), standard)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it was opened for something else
    sys.argv = [name, *flags]
    if program is not None:
        exec(program, {"__name__": "__main__"})
    else:
        run(import_module(f"gridsieve.services.{name}.__main__").main)


def _end_with_tests() -> None:
    tests = multiprocessing.parent_process()
    assert tests is not None
    tests.join()
    os.kill(os.getpid(), signal.SIGKILL)
