"""Signals and exit statuses of `gridsieve serve`, and of commands that start services, over stand-ins."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from gridsieve.cli.launcher import SERVICES
from gridsieve.common.process import ExitStatus
from tests.gridsieve.conftest import COMMAND, SIGINT_IGNORED
from tests.gridsieve.stack import stopped

ALL = ["generation", "encoder", "preprocessing"]


@contextmanager
def served(
    record: Path, more: str = "", before: Sequence[str] = (), after: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """`gridsieve serve` over stand-ins.

    more: flags of all stand-ins; before: the command that starts it; after: more flags of its own.
    """
    listens = (
        flag
        for name in ("preprocessing-", "encoder-", "")
        for flag in (f"--{name}listen", f"unix:{record}/{name}socket")
    )
    command = [*before, *COMMAND, "serve", "--metrics-port", "0", "--http-listen", "", *listens, *after]
    environment = {**os.environ, "MORE": more}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_until_ready(process: subprocess.Popen[str]) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if "gridsieve listens at" in line:
            return
    pytest.fail("gridsieve serve ended before it was ready")


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def test_a_service_that_cannot_start_ends_serve_with_2(record: Path) -> None:
    with served(record, "--refuse-to-start") as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == ExitStatus.CANNOT_START
    assert "cannot start, for the reason above" in errors


def test_a_malformed_address_ends_serve_with_2_in_one_line_about_its_flag(record: Path) -> None:
    with served(record, after=("--encoder-listen", "0.0.0.0")) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == ExitStatus.CANNOT_START
    assert re.fullmatch(r"STARTUP: --encoder-listen 0\.0\.0\.0\b.* port\b.*\n", errors)
    assert not list(record.glob("*.arguments"))


def test_one_flag_makes_the_services_that_compute_deterministic(record: Path) -> None:
    with served(record, after=("--deterministic",)) as process:
        wait_until_ready(process)
    given = {name for name in SERVICES if "'deterministic': True" in (record / f"{name}.arguments").read_text()}
    assert given == {"encoder", "generation"}


def test_a_signal_before_serve_is_ready_ends_it_by_that_signal(record: Path) -> None:
    with served(record, "--never-ready") as process:
        for name in SERVICES:
            wait_for(record / f"{name}.arguments")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    assert stopped(record) == []


@pytest.mark.parametrize(("before", "number"), [(SIGINT_IGNORED, signal.SIGINT), ((), signal.SIGHUP)])
def test_ctrl_c_even_if_ignored_before_and_a_closed_terminal_drain_all_services(
    record: Path, before: Sequence[str], number: signal.Signals
) -> None:
    with served(record, before=before) as process:
        wait_until_ready(process)
        process.send_signal(number)
        assert process.wait(30) == ExitStatus.FINISHED
    assert stopped(record) == ALL


def test_a_second_signal_ends_all_at_once_but_hangups_do_not_count(record: Path) -> None:
    with served(record, "--ignore-sigterm") as process:
        wait_until_ready(process)
        process.send_signal(signal.SIGTERM)
        wait_for(record / "generation.terminating")
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 128 + signal.SIGINT
    assert stopped(record) == []


def test_a_service_that_ends_by_itself_makes_serve_end_with_1(record: Path) -> None:
    with served(record, "--end-by-itself") as process:
        wait_until_ready(process)
        (record / "end").touch()
        assert process.wait(30) == ExitStatus.FAILED


# --- commands that start services for one run -------------------------------------------------------------------

UNWIND = """
import sys, time
from gridsieve.cli.launcher import LocalStack
from gridsieve.cli.signals import unwind_on_signals
unwind_on_signals()
try:
    with LocalStack(flags={"generation": sys.argv[1:]}):
        print("ready", flush=True)
        while True:
            time.sleep(0.1)  # briefly: a signal that the kernel gives to another thread does not end a sleep
except KeyboardInterrupt:
    raise SystemExit(1) from None
"""


@contextmanager
def unwinding(before: Sequence[str] = (), *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [*before, sys.executable, "-c", UNWIND, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("before", "number", "status"),
    [(SIGINT_IGNORED, signal.SIGINT, 1), ((), signal.SIGTERM, 143)],
    ids=["SIGINT", "SIGTERM"],
)
def test_a_signal_unwinds_a_command_and_stops_its_services(
    record: Path, before: Sequence[str], number: signal.Signals, status: int
) -> None:
    with unwinding(before) as process:
        process.send_signal(number)
        assert process.wait(60) == status
    assert stopped(record) == ALL


def test_a_second_hangup_does_not_interrupt_the_stopping(record: Path) -> None:
    with unwinding((), "--ignore-sigterm", "--end-by-itself") as process:
        process.send_signal(signal.SIGHUP)
        wait_for(record / "generation.terminating")
        process.send_signal(signal.SIGHUP)
        (record / "end").touch()
        assert process.wait(60) == 128 + signal.SIGHUP
    assert stopped(record) == ["encoder", "preprocessing"]


def test_under_nohup_a_hangup_has_no_effect_and_requests_that_are_cut_off_make_serve_end_with_3(record: Path) -> None:
    with served(record, "--cut-off", before=("nohup",)) as process:
        wait_until_ready(process)
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == ExitStatus.CUT_OFF
    assert stopped(record) == ALL
