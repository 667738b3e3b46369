"""/metrics before those who connect and do not ask: they are given up, and only so many are let in."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeAlias

import pytest

from common.process import free_port
from common.serving import exposition
from common.serving.guards import metrics_tls
from common.serving.settings import ServiceSettings
from tests.certificates import Authority
from tests.preprocessing.media_server import open_files

# The port, and what a client trusts there.
Served: TypeAlias = tuple[int, ssl.SSLContext | None]

HOST = "127.0.0.1"
TIMEOUT_S = 10.0
# Of TLS's first message, whose handshake is never finished.
HELLO = bytes([22, 3, 1, 2, 0])
# The same, and what it begins with: a hello of 8188 bytes.
LONG_HELLO = bytes([22, 3, 1, 32, 0, 1, 0, 31, 252, 3, 3])


@pytest.fixture(params=["plain", "tls"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Served:
    port, tls, trusting = free_port(), None, None
    if request.param == "tls":
        authority = Authority(tmp_path)
        own = authority.issue(HOST)
        files = {"tls_cert": own.cert, "tls_key": own.key}
        settings = ServiceSettings(listen="127.0.0.1:1", metrics_port=port, metrics_tls=True, **files)
        tls, trusting = metrics_tls(settings), ssl.create_default_context(cafile=str(authority.path))
    exposition.serve_metrics(port, HOST, tls)
    return port, trusting


def told(port: int, trusting: ssl.SSLContext | None) -> str:
    if trusting is None:
        connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_S)
    else:
        connection = http.client.HTTPSConnection(HOST, port, timeout=TIMEOUT_S, context=trusting)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def ends(connection: socket.socket) -> None:
    """Returns once the other side has closed it."""
    try:
        while connection.recv(2**16):
            pass
    except ConnectionResetError:
        pass


@pytest.mark.parametrize("said", [b"", HELLO, b"GET /metrics HTTP/1.0\r\n"], ids=["nothing", "hello", "half a request"])
def test_whoever_does_not_ask_is_given_up(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], said: bytes
) -> None:
    threads, files = threading.active_count(), open_files()
    with monkeypatch.context() as hasty, ExitStack() as connections:
        hasty.setattr(exposition, "REQUEST_S", 0.3)
        silent = [
            connections.enter_context(socket.create_connection((HOST, served[0]), timeout=TIMEOUT_S)) for _ in range(8)
        ]
        for each in silent:
            each.sendall(said)
        for each in silent:
            ends(each)
    deadline = time.monotonic() + TIMEOUT_S
    while threading.active_count() > threads or open_files() > files:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert "framesieve_requests_total" in told(*served)
    assert capfd.readouterr().err == ""


def test_whoever_asks_a_byte_at_a_time_is_given_up_as_well(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    with monkeypatch.context() as hasty, socket.create_connection((HOST, served[0]), timeout=TIMEOUT_S) as slow:
        hasty.setattr(exposition, "REQUEST_S", 0.5)
        slow.sendall(LONG_HELLO if served[1] else b"GET /")
        with suppress(ConnectionError):
            while time.monotonic() < deadline:
                slow.sendall(b"a")
                time.sleep(0.05)
    assert time.monotonic() < deadline
    assert "framesieve_requests_total" in told(*served)
    assert capfd.readouterr().err == ""


def test_of_many_who_connect_the_last_are_closed_and_whoever_leaves_makes_room(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exposition, "MAX_CONNECTIONS", 3)
    with ExitStack() as connections:
        for _ in range(3):
            connections.enter_context(socket.create_connection((HOST, served[0]), timeout=TIMEOUT_S))
        with socket.create_connection((HOST, served[0]), timeout=TIMEOUT_S) as refused:
            ends(refused)
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            answer = told(*served)
            break
        except (OSError, http.client.HTTPException):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert "framesieve_requests_total" in answer
