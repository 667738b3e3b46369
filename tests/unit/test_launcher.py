"""The launcher with stand-in services: small gRPC health servers that misbehave when a flag tells them to."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from client.launcher import SERVICES, Endpoint, LocalStack
from common.errors import StartupError
from common.exit_status import ExitStatus

STAND_IN = """
import argparse, os, pathlib, signal, sys, threading, time
from concurrent import futures
import grpc
from grpc_health.v1 import health, health_pb2_grpc

parser = argparse.ArgumentParser()
for name in ("listen", "metrics-port", "drain-s", "model", "media-root", "preprocessing", "encoder", "extra"):
    parser.add_argument("--" + name)
for name in ("refuse-to-start", "never-ready", "ignore-sigterm", "cut-off", "end-by-itself"):
    parser.add_argument("--" + name, action="store_true")
arguments = parser.parse_args([*sys.argv[1:], *os.environ.get("MORE", "").split()])
name = pathlib.Path(sys.argv[0]).stem
record = pathlib.Path(os.environ["RECORD"])
print(name, "says hello", flush=True)
(record / f"{name}.arguments").write_text(repr(vars(arguments)))
if arguments.refuse_to_start:
    print("cannot start: a weight is missing", file=sys.stderr)
    sys.exit(2)
if arguments.never_ready:
    time.sleep(60)

server = grpc.server(futures.ThreadPoolExecutor(2))
health_pb2_grpc.add_HealthServicer_to_server(health.HealthServicer(), server)
server.add_insecure_port(arguments.listen)
server.start()
stopping = threading.Event()

def on_term(*_):
    if not arguments.ignore_sigterm:
        stopping.set()

signal.signal(signal.SIGTERM, on_term)
while not stopping.wait(0.02):
    if arguments.end_by_itself and (record / "end").exists():
        sys.exit(1)
with (record / "stopped").open("a") as file:
    file.write(name + "\\n")
sys.exit(3 if arguments.cut_off else 0)
"""


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the stand-ins write what they were told and in which order they stopped."""
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").touch()
    for name in ("preprocessing", "encoder", "generation"):
        (tmp_path / "services" / f"{name}.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RECORD", str(tmp_path))
    return tmp_path


def stopped(record: Path) -> list[str]:
    path = record / "stopped"
    return path.read_text().split() if path.exists() else []


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_services_start_with_their_flags_and_stop_from_the_right(record: Path) -> None:
    model = record / "model"
    with LocalStack(model, media_root=record, flags={"generation": ["--extra", "7"]}) as stack:
        processes = dict(stack.processes)
        addresses, ports = stack.addresses, stack.metrics_ports
        assert stack.address == addresses["generation"]
        assert stack.log("encoder") == "encoder says hello\n"
        assert all(os.getsid(process.pid) == process.pid != os.getsid(0) for process in processes.values())
    assert stopped(record) == ["generation", "encoder", "preprocessing"]
    assert not any(is_running(process.pid) for process in processes.values())

    told = {name: (record / f"{name}.arguments").read_text() for name in processes}
    assert all(f"'listen': '{addresses[name]}'" in told[name] for name in told)
    assert all(f"'metrics_port': '{ports[name]}'" in told[name] for name in told)
    assert all(f"'model': '{model}'" in each for each in told.values())
    assert f"'media_root': '{record}'" in told["preprocessing"]
    assert "'media_root': None" in told["encoder"]
    assert f"'preprocessing': '{addresses['preprocessing']}'" in told["encoder"]
    assert f"'encoder': '{addresses['encoder']}'" in told["generation"]
    assert "'extra': '7'" in told["generation"]


def test_services_listen_where_they_are_told_to(record: Path) -> None:
    endpoints = {
        name: Endpoint(f"unix:{record}/{name}.sock", metrics_port=0)
        for name in ("preprocessing", "encoder", "generation")
    }
    with LocalStack(endpoints=endpoints) as stack:
        assert stack.address == f"unix:{record}/generation.sock"
        assert "'model': None" in (record / "generation.arguments").read_text()


def test_a_stack_of_the_first_two_services_starts_no_third(record: Path) -> None:
    with LocalStack(services=("preprocessing", "encoder")) as stack:
        assert list(stack.processes) == ["preprocessing", "encoder"]
    assert stopped(record) == ["encoder", "preprocessing"]


async def test_a_stack_is_an_async_context_manager_too(record: Path) -> None:
    async with LocalStack() as stack:
        assert stack.ended() is None
    assert stopped(record) == ["generation", "encoder", "preprocessing"]


async def test_a_cancelled_start_leaves_nothing_running(record: Path) -> None:
    stack = LocalStack(flags={"encoder": ["--never-ready"]})
    task = asyncio.ensure_future(stack.__aenter__())
    while len(stack.processes) < 3:
        await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not any(is_running(process.pid) for process in stack.processes.values())


def test_a_service_that_refuses_to_start_is_quoted_and_the_others_end(record: Path) -> None:
    stack = LocalStack(flags={"encoder": ["--refuse-to-start"]})
    with pytest.raises(StartupError, match=r"encoder ended with status 2(.|\n)*a weight is missing"):
        stack.start()
    assert not any(is_running(process.pid) for process in stack.processes.values())


def test_a_service_that_is_never_ready_is_named_after_the_deadline(record: Path) -> None:
    stack = LocalStack(flags={"preprocessing": ["--never-ready"]}, ready_timeout_s=4.0)
    with pytest.raises(StartupError, match=r"preprocessing was not ready after 4 s(.|\n)*preprocessing says hello"):
        stack.start()
    assert not any(is_running(process.pid) for process in stack.processes.values())


def test_a_service_that_dies_is_noticed_and_the_rest_stop_in_order(record: Path) -> None:
    with LocalStack() as stack:
        stack.processes["encoder"].send_signal(signal.SIGKILL)
        with pytest.raises(StartupError, match="encoder was ended by SIGKILL"):
            stack.watch()
    assert stopped(record) == ["generation", "preprocessing"]


def test_a_service_that_ignores_sigterm_is_killed_after_its_grace(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("client.launcher.KILL_AFTER_DRAIN_S", 0.2)
    with LocalStack(flags={"generation": ["--ignore-sigterm"]}, drain_s=0.2) as stack:
        start = time.monotonic()
    assert 0.4 <= time.monotonic() - start < 15
    assert stack.processes["generation"].returncode == -signal.SIGKILL
    assert stopped(record) == ["encoder", "preprocessing"]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 1), (signal.SIGTERM, 143)])
def test_a_parent_that_is_told_to_go_takes_its_services_with_it(
    record: Path, number: signal.Signals, status: int
) -> None:
    code = """
from client.launcher import LocalStack
from client.signals import unwind_on_sigterm
unwind_on_sigterm(143)
try:
    with LocalStack() as stack:
        print("ready", flush=True)
        stack.watch()
except KeyboardInterrupt:
    raise SystemExit(1) from None
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(number)
        assert parent.wait(10) == status
    assert stopped(record) == ["generation", "encoder", "preprocessing"]


SERVE = """
import sys
from client.launcher import LocalStack
from client.signals import DrainOnSignals
stack = LocalStack(flags={"generation": sys.argv[1:]}, drain_s=60)
DrainOnSignals(stack)
with stack:
    print("ready", flush=True)
    stack.watch()
    print("draining", flush=True)
raise SystemExit(stack.exit_status)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(("flags", "status"), [([], 0), (["--cut-off"], 3)])
def test_the_first_signal_drains_in_order_and_the_status_says_whether_all_was_finished(
    record: Path, number: signal.Signals, flags: list[str], status: int
) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVE, *flags], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(number)
        assert parent.wait(10) == status
    assert stopped(record) == ["generation", "encoder", "preprocessing"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_all_services_at_once(record: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", SERVE, "--ignore-sigterm"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(signal.SIGTERM)
        assert parent.stdout.readline() == b"draining\n"
        parent.send_signal(number)
        assert parent.wait(10) == 128 + number
    assert stopped(record) == []


# --- what the command ends with -------------------------------------------------------------------------------------


@contextmanager
def served(record: Path, more: str = "") -> Iterator[subprocess.Popen[str]]:
    """`framesieve serve` over stand-ins with these flags."""
    code = "from client.cli import app; app()"
    listens = (
        flag
        for name in ("preprocessing-", "encoder-", "")
        for flag in (f"--{name}listen", f"unix:{record}/{name}socket")
    )
    command = [sys.executable, "-c", code, "serve", "--metrics-port", "0", *listens]
    environment = {**os.environ, "MORE": more}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
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
        _, told = process.communicate(timeout=20)
    assert process.returncode == ExitStatus.CANNOT_START
    assert "ended with status 2" in told


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_serve_by_its_number_before_it_is_ready(record: Path, number: signal.Signals) -> None:
    with served(record, "--never-ready") as process:
        while len(list(record.glob("*.arguments"))) < len(SERVICES):
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(10) == 128 + number
    assert stopped(record) == []


def test_serve_ends_with_0_once_it_was_ready_and_is_told_to_stop(record: Path) -> None:
    with served(record) as process:
        read_until(process, "framesieve answers at")
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == ExitStatus.FINISHED
    assert stopped(record) == ["generation", "encoder", "preprocessing"]


def test_serve_ends_with_1_where_a_service_ends_by_itself(record: Path) -> None:
    with served(record, "--end-by-itself") as process:
        read_until(process, "framesieve answers at")
        (record / "end").touch()
        assert process.wait(10) == ExitStatus.FAILED
