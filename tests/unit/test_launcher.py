"""The launcher over stand-ins for the services."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from client.launcher import Endpoint, LocalStack
from common.errors import StartupError
from tests.unit.stand_ins import stopped


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
