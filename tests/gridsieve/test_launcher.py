"""LocalStack over stand-ins for the services: starting, watching, stopping."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
from ast import literal_eval
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest

from gridsieve.cli import launcher
from gridsieve.cli.launcher import GATEWAY, SERVICES, Endpoint, LocalStack
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.contract.errors import StartupError
from tests.gridsieve.stack import events, stopped


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_services_get_their_flags_and_stop_from_the_right(record: Path) -> None:
    model = DEMO_MODEL
    async with LocalStack(model, media_root=record, flags={"generation": ["--extra", "7"]}) as stack:
        processes = dict(stack.processes)
        addresses, ports = stack.addresses, stack.metrics_ports
        assert stack.address == addresses["generation"]
        assert stack.log("encoder") == "encoder says hello\n"
        # In a session of its own: Ctrl-C in the terminal does not reach it.
        assert all(os.getsid(process.pid) == process.pid != os.getsid(0) for process in processes.values())
    assert stopped(record) == ["generation", "encoder", "preprocessing"]
    assert not any(is_running(process.pid) for process in processes.values())

    arguments = {name: literal_eval((record / f"{name}.arguments").read_text()) for name in SERVICES}
    for name in SERVICES:
        own = {"listen": addresses[name], "metrics_port": str(ports[name]), "model": str(model)}
        assert own.items() <= arguments[name].items()
    assert [arguments[name]["media_root"] for name in SERVICES] == [str(record), None, None]
    assert [arguments[name]["preprocessing"] for name in SERVICES] == [None, *[addresses["preprocessing"]] * 2]
    assert (arguments["generation"]["encoder"], arguments["generation"]["extra"]) == (addresses["encoder"], "7")


@pytest.mark.parametrize("is_given", [False, True])
def test_the_gateway_and_preprocessing_have_one_folder_for_uploads_private_and_temporary_unless_it_is_given(
    record: Path, is_given: bool
) -> None:
    given = record / "given"
    given.mkdir()
    flags = {GATEWAY: [f"--upload-root={given}"]} if is_given else {}
    with LocalStack(services=(*SERVICES, GATEWAY), flags=flags):
        arguments = {name: literal_eval((record / f"{name}.arguments").read_text()) for name in (*SERVICES, GATEWAY)}
        found, encoder, generation, root = (each["upload_root"] for each in arguments.values())
        assert (found, encoder, generation) == (root, None, None)
        assert is_given or stat.S_IMODE(Path(root).stat().st_mode) == 0o700
    assert (root == str(given), Path(root).exists()) == (is_given, is_given)


@pytest.mark.parametrize(
    ("service", "flag"),
    [("encoder", "--encoder-listen"), ("generation", "--listen"), ("encoder", "--metrics-port")],
)
def test_a_port_in_use_is_reported_before_anything_starts(record: Path, service: str, flag: str) -> None:
    endpoints = {name: Endpoint(f"unix:{record}/{name}.sock", metrics_port=0) for name in SERVICES}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        taken = replace(
            endpoints[service],
            **{"metrics_port": port} if flag == "--metrics-port" else {"address": f"127.0.0.1:{port}"},
        )
        stack = LocalStack(endpoints={**endpoints, service: taken})
        with pytest.raises(StartupError, match=f"{port} of {service}.* in use.* {flag}\\b"):
            stack.start()
    assert not stack.processes


def test_the_extras_of_all_services_without_their_packages_are_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_spec", lambda _: None)
    extras = r"pip install 'gridsieve\[preprocessing,encoder,generation,gateway\]'$"
    with pytest.raises(StartupError, match=extras):
        LocalStack(services=(*SERVICES, launcher.GATEWAY)).start()


def test_two_services_start_over_a_stale_socket_file_with_a_client_certificate_in_the_environment(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Unix sockets never use TLS, so the certificate must not require an authority.
    monkeypatch.setenv("GRIDSIEVE_TLS_CERT", str(record / "cert.pem"))
    monkeypatch.setenv("GRIDSIEVE_TLS_KEY", str(record / "key.pem"))
    stale = f"{record}/stale.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(stale)
    endpoints = {"preprocessing": Endpoint(f"unix:{stale}", 0), "encoder": Endpoint(f"unix:{record}/encoder.sock", 0)}
    with LocalStack(services=("preprocessing", "encoder"), endpoints=endpoints) as stack:
        assert stack.addresses == {name: each.address for name, each in endpoints.items()}
    assert stopped(record) == ["encoder", "preprocessing"]


@pytest.mark.parametrize(
    ("encoder", "generation", "waits"),
    [
        (["--device=cuda", "--tower-tensor-parallel=2"], ["--device", "cuda:1"], True),
        (["--device=cuda:0"], ["--device=cuda:1"], False),
        (["--device=auto"], ["--device=cuda"], False),
    ],
)
def test_generation_starts_once_the_encoder_of_its_gpu_serves(
    record: Path, monkeypatch: pytest.MonkeyPatch, encoder: list[str], generation: list[str], waits: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # for auto, there is no GPU
    reports: list[str] = []
    flags = {"encoder": [*encoder, "--slow-start"], "generation": generation}
    with patch.object(launcher, "REPORT_S", 0.25), LocalStack(flags=flags, report=reports.append):
        order = events(record)
    assert (order.index(("encoder", "serving")) < order.index(("generation", "started"))) == waits
    assert any("encoder" in each for each in reports)


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
        stack.kill()
    assert killed == [stack.processes[name].pid for name in ("preprocessing", "generation")]


def test_a_service_that_ignores_sigterm_is_killed_after_its_grace(
    record: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gridsieve.cli.launcher.KILL_AFTER_DRAIN_S", 0.2)
    services = ("preprocessing",)
    with LocalStack(services=services, flags={"preprocessing": ["--ignore-sigterm"]}, drain_s=0.2) as stack:
        pass
    assert stack.processes["preprocessing"].returncode == -signal.SIGKILL
