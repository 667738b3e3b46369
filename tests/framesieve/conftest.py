"""Fixtures of the command's tests: hand-written services on a unix socket, and the command itself."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from framesieve.__main__ import app
from framesieve.v1 import (
    encoder_pb2_grpc,
    generation_pb2_grpc,
    preprocessing_pb2_grpc,
)
from tests.framesieve.command_services import FakeServices
from tests.framesieve.stand_ins import STAND_IN


@pytest.fixture
def services() -> FakeServices:
    return FakeServices()


@pytest.fixture
def address(services: FakeServices, tmp_path: Path) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(services, server)
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(services, server)
    preprocessing_pb2_grpc.add_PreprocessingServiceServicer_to_server(services, server)
    server.add_insecure_port(f"unix:{tmp_path}/all.sock")
    server.start()
    yield f"unix:{tmp_path}/all.sock"
    server.stop(0).wait()


@pytest.fixture
def clip(tmp_path: Path) -> str:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"film")
    return str(path)


@pytest.fixture
def framesieve() -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments)

    return run


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder where the stand-ins write what they were told and in which order they stopped.

    What is started there heeds SIGHUP, even where the tests themselves are run by nohup.
    """
    (tmp_path / "services").mkdir()
    (tmp_path / "services" / "__init__.py").touch()
    for name in ("preprocessing", "encoder", "generation"):
        (tmp_path / "services" / f"{name}.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RECORD", str(tmp_path))
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield tmp_path
    signal.signal(signal.SIGHUP, before)
