"""What clients of the gateway are told while it drains, and when its grace period ends before their requests do."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from gridsieve.common.process import ExitStatus
from gridsieve.common.serving.health import Health
from gridsieve.v1 import generation_pb2_grpc
from tests.integration.fleet import metric_in, until
from tests.integration.gateway import gateway, question
from tests.integration.test_responses import Played
from tests.served import served

ERROR = {
    "message": "gateway is draining, and its grace period is over",
    "type": "service_unavailable_error",
    "param": None,
    "code": "UNAVAILABLE",
    "stage": "gateway",
}
ASKED = question("go on")


@pytest.fixture
def played() -> Iterator[tuple[Played, str]]:
    """Generation that is well, and its address."""
    played = Played()

    def register(server: grpc.aio.Server) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(played, server)
        health = Health(("",))
        health.set_serving(True, ready=True)
        health.add_to(server)

    with served(register) as address:
        yield played, address


def test_after_sigterm_a_stream_is_finished_and_new_questions_are_refused(
    played: tuple[Played, str], tmp_path: Path
) -> None:
    generation, address = played
    with gateway(address, tmp_path, "--drain-s", "120") as leaving, leaving.http() as client, leaving.http() as other:
        assert other.get("/version").json()["uploads"] is None  # and keeps its connection
        assert other.get("/health").status_code == 200
        with client.stream("POST", "/v1/chat/completions", json=ASKED | {"stream": True}) as streamed:
            lines = streamed.iter_lines()
            next(lines)
            leaving.process.send_signal(signal.SIGTERM)
            while other.get("/health").status_code == 200:
                time.sleep(0.01)
            refused = other.post("/v1/chat/completions", json=question("Why?"))
            assert (refused.status_code, refused.json()["error"]["stage"]) == (503, "gateway")
            assert "Retry-After" in refused.headers
            generation.enough.set()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert leaving.process.wait(20) == ExitStatus.FINISHED


async def test_a_drain_tells_the_clients_that_it_cuts_off(played: tuple[Played, str], tmp_path: Path) -> None:
    path, body = "/v1/chat/completions", ASKED
    with gateway(played[1], tmp_path, "--drain-s", "0.2") as leaving:
        reader, writer = await asyncio.open_connection("127.0.0.1", leaving.port)
        writer.write(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n".encode())  # and no body
        async with httpx.AsyncClient(base_url=leaving.url, timeout=60) as client:
            asking = asyncio.create_task(client.post(path, json=body))
            async with client.stream("POST", path, json={**body, "stream": True}) as streamed:
                lines = streamed.aiter_lines()
                await anext(lines)
                running = "gridsieve_requests_running"
                await until(lambda: metric_in(httpx.get(f"{leaving.url}/metrics").text, running) == 3)
                leaving.process.send_signal(signal.SIGTERM)
                told = [line async for line in lines if line]
            whole = await asking
        assert json.loads(told[-1].removeprefix("data: ")) == {"error": ERROR}
        assert (whole.status_code, whole.json()) == (503, {"error": ERROR})
        assert "Retry-After" in whole.headers
        late = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert late.startswith(b"HTTP/1.1 503 ")
        assert json.loads(late.partition(b"\r\n\r\n")[2]) == {"error": ERROR}
        assert await asyncio.to_thread(leaving.process.wait, 20) == ExitStatus.CUT_OFF
    ends = Counter(line["code"] for line in map(json.loads, leaving.log.read_text().splitlines()) if "code" in line)
    assert ends == {"UNAVAILABLE": 3}
