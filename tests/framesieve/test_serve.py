"""What `framesieve serve` ends with, over stand-ins for the services."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from common.process import ExitStatus
from framesieve.cli.launcher import SERVICES
from tests.framesieve.stand_ins import stopped


@contextmanager
def served(
    record: Path, more: str = "", before: Sequence[str] = (), stdin: int | None = None, stderr: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    """`framesieve serve` over stand-ins with these flags. before: what starts it."""
    code = "from framesieve.__main__ import app; app()"
    listens = (
        flag
        for name in ("preprocessing-", "encoder-", "")
        for flag in (f"--{name}listen", f"unix:{record}/{name}socket")
    )
    command = [*before, sys.executable, "-c", code, "serve", "--metrics-port", "0", *listens]
    environment = {**os.environ, "MORE": more}
    with subprocess.Popen(command, stdin=stdin, stderr=stderr, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    pytest.fail(f"nothing said {words!r}")


def test_serve_over_a_service_that_cannot_start_ends_with_2(record: Path) -> None:
    with served(record, "--refuse-to-start") as process:
        _, told = process.communicate(timeout=60)
    assert process.returncode == ExitStatus.CANNOT_START
    assert "ended with status 2" in told


def test_a_second_serve_at_the_same_addresses_ends_with_2_and_the_first_goes_on(record: Path) -> None:
    with served(record) as first:
        read_until(first, "framesieve answers at")
        with served(record) as second:
            _, told = second.communicate(timeout=60)
        assert second.returncode == ExitStatus.CANNOT_START
        assert f"unix:{record}/preprocessing-socket" in told
        assert "--preprocessing-listen" in told
        assert "framesieve answers at" not in told
        first.send_signal(signal.SIGTERM)
        assert first.wait(30) == ExitStatus.FINISHED


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_serve_by_its_number_before_it_is_ready(record: Path, number: signal.Signals) -> None:
    with served(record, "--never-ready") as process:
        while len(list(record.glob("*.arguments"))) < len(SERVICES):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert stopped(record) == []


def test_serve_ends_with_0_once_it_was_ready_and_is_told_to_stop(record: Path) -> None:
    with served(record) as process:
        read_until(process, "framesieve answers at")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == ExitStatus.FINISHED
    assert stopped(record) == ["generation", "encoder", "preprocessing"]


def test_no_service_outlives_a_terminal_that_is_closed(record: Path) -> None:
    terminal, inside = pty.openpty()
    with served(record, before=("setsid", "--ctty"), stdin=inside, stderr=inside) as process:
        os.close(inside)
        told = b""
        while not (b"framesieve ask" in told and told.endswith(b"\n")):
            told += os.read(terminal, 4096)
        os.close(terminal)
        assert process.wait(30) == ExitStatus.FINISHED
    assert stopped(record) == ["generation", "encoder", "preprocessing"]


def test_serve_ends_with_1_where_a_service_ends_by_itself(record: Path) -> None:
    with served(record, "--end-by-itself") as process:
        read_until(process, "framesieve answers at")
        (record / "end").touch()
        assert process.wait(30) == ExitStatus.FAILED
