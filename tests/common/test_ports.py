"""Ports for listeners that start later: they must be there for them then."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from common.ports import free_port


def test_no_outgoing_connection_is_ever_given_one_of_these() -> None:
    lowest, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(1024 <= free_port() < lowest for _ in range(50))


def test_a_port_is_given_once() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == len(ports)


def test_what_is_listened_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    first = free_port()
    with ExitStack() as listeners:
        taken = [listeners.enter_context(socket.create_server(("127.0.0.1", free_port()))) for _ in range(3)]
        ports = [each.getsockname()[1] for each in taken]
        monkeypatch.setattr("common.ports._PORTS", [*ports, first])
        assert {free_port() for _ in range(2)} == {first}
        monkeypatch.setattr("common.ports._PORTS", range(ports[0], ports[0] + 1))
        with pytest.raises(OSError, match=f"none of 1000 ports of 127.0.0.1 from {ports[0]} to {ports[0]} is free"):
            free_port()
