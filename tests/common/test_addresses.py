"""Addresses and ports that a service cannot have: it ends at once, with one line that names the flag."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from socket import create_server
from types import ModuleType

import pytest

import gridsieve.services.encoder.__main__ as encoder
import gridsieve.services.generation.__main__ as generation
import gridsieve.services.preprocessing.__main__ as preprocessing
from gridsieve.common.contract.errors import StartupError


@pytest.fixture
def used_port() -> Iterator[int]:
    with create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("service", "flags", "told"),
    [
        (preprocessing, "--listen 0.0.0.0", "--listen 0.0.0.0.* port"),
        (preprocessing, "--listen :50063", "--listen :50063.* host"),
        (preprocessing, "--listen 192.0.2.7:50063", "--listen 192.0.2.7:50063.* assign"),
        (preprocessing, "--listen unix:/nowhere.socket --metrics-port USED", "--metrics-port USED.* in use"),
        *(
            (each, "--listen 127.0.0.1:USED", "--listen 127.0.0.1:USED.* in use")
            for each in (preprocessing, encoder, generation)
        ),
    ],
)
async def test_a_service_refuses_an_address_it_cannot_have_before_it_looks_for_its_model(
    service: ModuleType, flags: str, told: str, used_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["service", "--model", "/nowhere", "--metrics-port=0", *flags.replace("USED", str(used_port)).split()]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(service, "configure_logging", lambda *_: None)
    with pytest.raises(StartupError, match=told.replace("USED", str(used_port))):
        await service.main()
