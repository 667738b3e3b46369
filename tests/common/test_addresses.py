"""Addresses and ports that a service cannot have: it ends at once, with one line that names the flag."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from socket import create_server

import pytest

from framesieve.common.process import ExitStatus


@pytest.fixture
def used_port() -> Iterator[int]:
    with create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("service", "flags", "told"),
    [
        ("preprocessing", "--listen 127.0.0.1:99999", "--listen 127.0.0.1:99999.* port"),
        ("preprocessing", "--listen 0.0.0.0", "--listen 0.0.0.0.* port"),
        ("preprocessing", "--listen :50063", "--listen :50063.* host"),
        ("preprocessing", "--listen 192.0.2.7:50063", "--listen 192.0.2.7:50063.* assign"),
        ("preprocessing", "--listen unix:/nowhere.socket --metrics-port USED", "--metrics-port USED.* in use"),
        # These two would load a model first, and say so in the log.
        ("encoder", "--listen 127.0.0.1:USED", "--listen 127.0.0.1:USED.* in use"),
        pytest.param(
            *("generation", "--listen 127.0.0.1:USED", "--listen 127.0.0.1:USED.* in use"), marks=pytest.mark.deep
        ),
        ("preprocessing", "--listen 127.0.0.1:USED", "--listen 127.0.0.1:USED.* in use"),
    ],
)
def test_a_service_refuses_an_address_it_cannot_have_at_once_in_one_line_about_its_flag(
    service: str, flags: str, told: str, used_port: int
) -> None:
    command = [sys.executable, "-m", f"framesieve.services.{service}", "--metrics-port=0"]
    command += flags.replace("USED", str(used_port)).split()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == ExitStatus.CANNOT_START
    (line,) = (ended.stdout + ended.stderr).splitlines()
    assert re.search(told.replace("USED", str(used_port)), line)
