"""Fixtures of the client's and the command's tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from gridsieve.__main__ import app
from gridsieve.v1 import encoder_pb2_grpc, generation_pb2_grpc, preprocessing_pb2_grpc
from tests.gridsieve.fake_services import FakeServices
from tests.gridsieve.films import FakeEmbedder
from tests.gridsieve.stack import write_stand_ins
from tests.served import served

COMMAND = (sys.executable, "-c", "from gridsieve.__main__ import app; app()")
SIGINT_IGNORED = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
"""Starts a command as a shell starts the background jobs of a script."""


@pytest.fixture(scope="session", autouse=True)
def default_signals() -> Iterator[None]:
    """Child processes start with default signal dispositions, also under nohup or in the background of a script."""
    before = {
        signal.SIGHUP: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        signal.SIGINT: signal.signal(signal.SIGINT, signal.default_int_handler),
    }
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def services() -> FakeServices:
    return FakeServices()


@pytest.fixture
def address(services: FakeServices, tmp_path: Path) -> Iterator[str]:
    """The unix socket of a server with all three services."""

    def register(server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(services, server)
        encoder_pb2_grpc.add_EncoderServiceServicer_to_server(services, server)
        preprocessing_pb2_grpc.add_PreprocessingServiceServicer_to_server(services, server)

    with served(register, f"unix:{tmp_path}/all.sock") as address:
        yield address


@pytest.fixture
def embedder() -> FakeEmbedder:
    return FakeEmbedder()


@pytest.fixture
def embeds(embedder: FakeEmbedder, tmp_path: Path) -> Iterator[str]:
    """The address of the embedder."""
    with served(
        lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(embedder, server),
        f"unix:{tmp_path}/embedder.sock",
    ) as address:
        yield address


@pytest.fixture
def clip(tmp_path: Path) -> str:
    path = tmp_path / "clip.mp4"
    path.write_bytes(b"film")
    return str(path)


@pytest.fixture
def gridsieve() -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, arguments)

    return run


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which stand-ins for the services record their arguments and the order in which they stop."""
    write_stand_ins(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("RECORD", str(tmp_path))
    return tmp_path
