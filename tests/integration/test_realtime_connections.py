"""Connections of /v1/realtime: who may open them, how large their messages are, and clients that misbehave."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gridsieve.common.contract.limits import MAX_PICTURE_BYTES
from gridsieve.common.process import ExitStatus
from gridsieve.services.gateway.http.websocket import MAX_PARTS, WebSocketProtocol
from tests.integration.fleet import TIMED, Stack
from tests.integration.gateway import Gateway, data_url, gateway
from tests.integration.live import PICTURES
from tests.integration.realtime import (
    DONE,
    TOKEN,
    WATCHING,
    image,
    made,
    opened,
    updated,
)


@pytest.fixture(scope="module")
def door(live_door: Gateway) -> Gateway:
    return live_door


async def refusal(door: Gateway, **options: Any) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as refused:
        async with opened(door, **options):
            pass
    response = refused.value.response
    assert response.headers["x-request-id"]
    return response.status_code, json.loads(response.body)["error"]["type"]


async def test_it_has_the_doors_access_and_limits(live_stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"alice {TOKEN}\n")
    flags = ["--auth-tokens-file", str(tmp_path / "tokens"), "--cors-origins", "https://page.example"]
    flags += ["--max-inline-bytes", "300000", "--max-requests", "1", "--drain-s", "0.2"]
    flags += ["--max-bytes-per-client", "1000000"]
    key = {"additional_headers": {"authorization": f"Bearer {TOKEN}"}}
    with gateway(live_stack.address, tmp_path, *flags) as guarded:
        assert await refusal(guarded) == (401, "authentication_error")
        assert await refusal(guarded, **key, query="?model=other") == (404, "not_found_error")
        assert await refusal(guarded, **key, origin="https://other.example") == (403, "permission_error")
        assert await refusal(guarded, **key, origin="http://[") == (403, "permission_error")
        for origin in ("https://page.example", guarded.url):
            async with opened(guarded, **key, origin=origin) as socket:
                assert json.loads(await socket.recv())["type"] == "session.created"
        encoded = TOKEN.replace("/", "%2F").replace("=", "%3D")
        async with opened(guarded, subprotocols=["realtime", f"openai-insecure-api-key.{encoded}"]) as socket:
            assert socket.subprotocol == "realtime"
            await socket.recv()
            assert await refusal(guarded, **key) == (429, "rate_limit_error")
            for letters, param in ((600_000, None), (400_000, "response_id")):  # each letter is two bytes
                event = {"type": "response.cancel", "event_id": f"of {letters}", "response_id": "é" * letters}
                await socket.send(json.dumps(event, ensure_ascii=False))
                error = json.loads(await socket.recv())["error"]
                assert (error["event_id"], error["param"]) == (event["event_id"], param)
            with suppress(ConnectionClosed):
                await socket.send("x" * 5_000_000)
            await socket.wait_closed()
            assert socket.close_code == 1009
        async with opened(guarded, **key) as socket:
            await socket.recv()
            guarded.process.send_signal(signal.SIGTERM)
            assert "draining" in json.loads(await socket.recv())["error"]["message"]
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd.code == 1012
        assert await asyncio.to_thread(guarded.process.wait, 20) == ExitStatus.CUT_OFF
    log = guarded.log.read_text()
    assert TOKEN not in log
    lines = [json.loads(line) for line in log.splitlines()]
    ends = [line["code"] for line in lines if line["event"] == "request ended" and line["method"] == "Realtime"]
    assert Counter(ends) == {
        "UNAUTHENTICATED": 1,
        "INVALID_ARGUMENT": 3,
        "RESOURCE_EXHAUSTED": 1,
        "OK": 3,
        "UNAVAILABLE": 1,
    }


@pytest.mark.deep  # of times, which a busy machine makes longer
async def test_large_pictures_do_not_hold_up_the_gateways_loop(live_stack: Stack, tmp_path: Path) -> None:
    """As in test_event_loop.py: a fault is slow in every round."""
    # Readers skip what follows the picture. To join the parts of the largest message takes about as long as is slow.
    large = PICTURES[0] + bytes(MAX_PICTURE_BYTES // 2 - len(PICTURES[0]))
    shown, slow = made(image(0) | {"image_url": data_url("image/png", large)}), list[set[str]]()
    with gateway(live_stack.address, tmp_path, program=TIMED.format(name="gateway")) as timed:
        async with opened(timed) as socket:
            for event in (updated(**WATCHING), *[shown] * 3):
                before = len(timed.log.read_text())
                await socket.send(json.dumps(event))
                while (told := json.loads(await socket.recv()))["type"] not in ("session.updated", DONE):
                    assert told["type"] != "error", told
                slow.append(set(re.findall("^SLOW (.*)", timed.log.read_text()[before:], re.MULTILINE)))
    assert not set.intersection(*slow[1:]), slow


async def test_a_message_of_parts_without_end_ends_the_connection(door: Gateway) -> None:
    async def parts() -> AsyncIterator[str]:
        for _ in range(4 * MAX_PARTS):
            yield ""

    async with opened(door) as socket:
        with suppress(ConnectionClosed):
            await socket.send(parts())
        await asyncio.wait_for(socket.wait_closed(), 10)


async def test_a_client_that_reads_nothing_is_left() -> None:
    """Whatever it sends: pings are answered where there is room alone."""
    left = asyncio.Event()

    async def chatty(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        try:
            while True:
                await send({"type": "websocket.send", "text": "x" * 60_000})
        finally:
            left.set()

    state = ServerState()
    config = uvicorn.Config(
        chatty,
        log_config=None,
        ws_per_message_deflate=False,
        ws_ping_interval=0.5,
        ws_ping_timeout=0.5,
    )
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: WebSocketProtocol(config, state, {}), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect(f"ws://127.0.0.1:{port}", proxy=None, max_queue=1, close_timeout=0.1) as socket:
            await asyncio.sleep(0.1)
            for number in range(5_000):
                await socket.ping(f"{number:0125}")
            await asyncio.sleep(0.1)
            for connection in state.connections:  # on a busy machine it may be left already
                assert connection.transport.get_write_buffer_size() < 500_000
            await asyncio.wait_for(left.wait(), 2)
            assert not state.connections
