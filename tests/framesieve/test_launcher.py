"""The launcher over stand-ins for the services."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.contract.errors import StartupError
from framesieve.cli.launcher import SERVICES, Endpoint, LocalStack
from tests.framesieve.stand_ins import stopped


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


def listening(folder: Path, kind: str) -> tuple[socket.socket, str]:
    """Somebody who takes connections, and their address."""
    listener = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    listener.bind(f"{folder}/taken.sock" if kind == "unix" else ("127.0.0.1", 0))
    listener.listen()
    return listener, f"unix:{folder}/taken.sock" if kind == "unix" else f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize(("service", "flag"), [("encoder", "--encoder-listen"), ("generation", "--listen")])
def test_nothing_is_started_where_somebody_listens_already_who_would_answer_for_a_service(
    record: Path, kind: str, service: str, flag: str
) -> None:
    listener, address = listening(record, kind)
    endpoints = {name: Endpoint(f"unix:{record}/{name}.sock", metrics_port=0) for name in SERVICES}
    stack = LocalStack(endpoints={**endpoints, service: Endpoint(address, metrics_port=0)})
    with listener, pytest.raises(StartupError, match=f"{address} of {service} is already in use.* {flag}$"):
        stack.start()
    assert not stack.processes


def test_a_socket_s_file_that_nobody_listens_at_is_in_nobodys_way(record: Path) -> None:
    listener, address = listening(record, "unix")
    listener.close()
    endpoints = {"preprocessing": Endpoint(address, metrics_port=0)}
    with LocalStack(services=("preprocessing",), endpoints=endpoints) as stack:
        assert stack.ended() is None


def test_sockets_of_a_stack_s_own_need_no_authority_where_a_client_s_certificate_is_set(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FRAMESIEVE_TLS_CERT", str(record / "cert.pem"))
    monkeypatch.setenv("FRAMESIEVE_TLS_KEY", str(record / "key.pem"))
    with LocalStack(services=("preprocessing",)) as stack:
        assert stack.ended() is None


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


def test_a_process_that_was_waited_for_is_not_killed_by_its_number(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []

    def kill(group: int, number: int) -> None:
        killed.append(group)
        os.kill(group, number)

    with LocalStack() as stack:
        stack.processes["encoder"].kill()
        stack.processes["encoder"].wait()
        monkeypatch.setattr(os, "killpg", kill)
        stack.end_at_once()
    assert killed == [stack.processes[name].pid for name in ("preprocessing", "generation")]


def test_a_service_that_ignores_sigterm_is_killed_after_its_grace(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("framesieve.cli.launcher.KILL_AFTER_DRAIN_S", 0.2)
    with LocalStack(flags={"generation": ["--ignore-sigterm"]}, drain_s=0.2) as stack:
        start = time.monotonic()
    assert 0.4 <= time.monotonic() - start < 15
    assert stack.processes["generation"].returncode == -signal.SIGKILL
    assert stopped(record) == ["encoder", "preprocessing"]


UNWIND = """
import sys
from framesieve.cli import launcher
from framesieve.cli.signals import unwind_on_signals
launcher.KILL_AFTER_DRAIN_S = 3
unwind_on_signals()
try:
    with launcher.LocalStack(flags={"generation": sys.argv[1:]}, drain_s=0) as stack:
        print("ready", flush=True)
        stack.watch()
except KeyboardInterrupt:
    raise SystemExit(1) from None
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 1), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_parent_that_is_told_to_go_takes_its_services_with_it(
    record: Path, number: signal.Signals, status: int
) -> None:
    with subprocess.Popen([sys.executable, "-c", UNWIND], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(number)
        assert parent.wait(30) == status
    assert stopped(record) == ["generation", "encoder", "preprocessing"]


SERVE = """
import sys
from framesieve.cli.launcher import LocalStack
from framesieve.cli.signals import DrainOnSignals
stack = LocalStack(flags={"generation": sys.argv[1:]}, drain_s=60)
DrainOnSignals(stack)
with stack:
    print("ready", flush=True)
    stack.watch()
    print("draining", flush=True)
raise SystemExit(stack.exit_status)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("flags", "status"), [([], 0), (["--cut-off"], 3)])
def test_the_first_signal_drains_in_order_and_the_status_says_whether_all_was_finished(
    record: Path, number: signal.Signals, flags: list[str], status: int
) -> None:
    with subprocess.Popen([sys.executable, "-c", SERVE, *flags], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(number)
        assert parent.wait(30) == status
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
        assert parent.wait(30) == 128 + number
    assert stopped(record) == []


@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGHUP])
def test_hang_ups_after_the_first_signal_cut_nothing_off(record: Path, first: signal.Signals) -> None:
    command = [sys.executable, "-c", SERVE, "--ignore-sigterm"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(first)
        assert parent.stdout.readline() == b"draining\n"
        parent.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            parent.wait(0.5)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(30) == 128 + signal.SIGTERM


@pytest.mark.parametrize("code", [SERVE, UNWIND], ids=["drains", "unwinds"])
def test_what_nohup_starts_outlives_a_hang_up(record: Path, code: str) -> None:
    with subprocess.Popen(["nohup", sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            parent.wait(0.5)
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(30) in (0, 128 + signal.SIGTERM)
    assert stopped(record) == ["generation", "encoder", "preprocessing"]


def test_a_second_hang_up_cuts_no_service_off(record: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", UNWIND, "--ignore-sigterm"], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        parent.send_signal(signal.SIGHUP)
        assert parent.wait(20) == 128 + signal.SIGHUP
    assert stopped(record) == ["encoder", "preprocessing"]
