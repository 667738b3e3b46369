"""LocalStack over stand-ins for the services: starting, watching, stopping."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from common.contract.errors import StartupError
from framesieve.cli.launcher import SERVICES, Endpoint, LocalStack
from tests.framesieve.stack import stopped


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def listening(folder: Path, kind: str) -> tuple[socket.socket, str]:
    """A socket that accepts connections, and its address."""
    listener = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    listener.bind(f"{folder}/taken.sock" if kind == "unix" else ("127.0.0.1", 0))
    listener.listen()
    return listener, f"unix:{folder}/taken.sock" if kind == "unix" else f"127.0.0.1:{listener.getsockname()[1]}"


async def test_services_get_their_flags_and_stop_from_the_right(record: Path) -> None:
    model = record / "model"
    async with LocalStack(model, media_root=record, flags={"generation": ["--extra", "7"]}) as stack:
        processes = dict(stack.processes)
        addresses, ports = stack.addresses, stack.metrics_ports
        assert stack.address == addresses["generation"]
        assert stack.log("encoder") == "encoder says hello\n"
        # In a session of its own: Ctrl-C in the terminal does not reach it.
        assert all(os.getsid(process.pid) == process.pid != os.getsid(0) for process in processes.values())
    assert stopped(record) == ["generation", "encoder", "preprocessing"]
    assert not any(is_running(process.pid) for process in processes.values())

    arguments = {name: (record / f"{name}.arguments").read_text() for name in SERVICES}
    for name in SERVICES:
        assert f"'listen': '{addresses[name]}'" in arguments[name]
        assert f"'metrics_port': '{ports[name]}'" in arguments[name]
        assert f"'model': '{model}'" in arguments[name]
    assert f"'media_root': '{record}'" in arguments["preprocessing"]
    assert "'media_root': None" in arguments["encoder"]
    assert f"'preprocessing': '{addresses['preprocessing']}'" in arguments["encoder"]
    assert f"'encoder': '{addresses['encoder']}'" in arguments["generation"]
    assert "'extra': '7'" in arguments["generation"]


@pytest.mark.parametrize(
    ("kind", "service", "flag"), [("unix", "encoder", "--encoder-listen"), ("tcp", "generation", "--listen")]
)
def test_an_address_in_use_is_reported_before_anything_starts(record: Path, kind: str, service: str, flag: str) -> None:
    listener, address = listening(record, kind)
    endpoints = {name: Endpoint(f"unix:{record}/{name}.sock", metrics_port=0) for name in SERVICES}
    stack = LocalStack(endpoints={**endpoints, service: Endpoint(address, metrics_port=0)})
    with listener, pytest.raises(StartupError, match=f"{address} of {service} is already in use.* {flag}$"):
        stack.start()
    assert not stack.processes


def test_two_services_start_over_a_stale_socket_file_with_a_client_certificate_in_the_environment(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Unix sockets never use TLS, so the certificate must not require an authority.
    monkeypatch.setenv("FRAMESIEVE_TLS_CERT", str(record / "cert.pem"))
    monkeypatch.setenv("FRAMESIEVE_TLS_KEY", str(record / "key.pem"))
    listener, address = listening(record, "unix")
    listener.close()
    endpoints = {"preprocessing": Endpoint(address, 0), "encoder": Endpoint(f"unix:{record}/encoder.sock", 0)}
    with LocalStack(services=("preprocessing", "encoder"), endpoints=endpoints) as stack:
        assert stack.addresses == {name: each.address for name, each in endpoints.items()}
        assert "'model': None" in (record / "encoder.arguments").read_text()
    assert stopped(record) == ["encoder", "preprocessing"]


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


def test_a_service_that_is_not_ready_in_time_is_named_and_killed(record: Path) -> None:
    stack = LocalStack(services=("preprocessing",), flags={"preprocessing": ["--never-ready"]}, ready_timeout_s=0.3)
    with pytest.raises(StartupError, match=r"preprocessing was not ready after 0\.3 s"):
        stack.start()
    assert not is_running(stack.processes["preprocessing"].pid)


def test_a_service_that_dies_is_noticed_and_never_killed_by_its_reusable_pid(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: list[int] = []

    def kill(group: int, number: int) -> None:
        killed.append(group)
        os.kill(group, number)

    with LocalStack() as stack:
        stack.processes["encoder"].send_signal(signal.SIGKILL)
        with pytest.raises(StartupError, match="encoder was ended by SIGKILL"):
            stack.watch()
        monkeypatch.setattr(os, "killpg", kill)
        stack.end_at_once()
    assert killed == [stack.processes[name].pid for name in ("preprocessing", "generation")]


def test_a_service_that_ignores_sigterm_is_killed_after_its_grace(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("framesieve.cli.launcher.KILL_AFTER_DRAIN_S", 0.2)
    with LocalStack(flags={"generation": ["--ignore-sigterm"]}, drain_s=0.2) as stack:
        pass
    assert stack.processes["generation"].returncode == -signal.SIGKILL
    assert stopped(record) == ["encoder", "preprocessing"]
