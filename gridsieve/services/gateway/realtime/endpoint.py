"""GET /v1/realtime: a WebSocket, which is one live session. Access is checked before it is accepted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

from starlette.websockets import WebSocket, WebSocketDisconnect

from gridsieve.common.contract.errors import Unavailable
from gridsieve.services.gateway.http.request_guard import Call
from gridsieve.services.gateway.models import Models
from gridsieve.services.gateway.realtime.connection import Connection
from gridsieve.services.gateway.realtime.events import Names, ServerEvent, dumped, error_event
from gridsieve.services.gateway.realtime.live import Generation

_SUBPROTOCOL = "realtime"
_SERVICE_RESTART, _INTERNAL_ERROR = 1012, 1011
"""Codes with which a WebSocket is closed. Source: RFC 6455 section 7.4, and its registry."""


class Realtime:
    def __init__(self, generation: Generation, models: Models) -> None:
        self._generation = generation
        self._models = models

    async def endpoint(self, socket: WebSocket) -> None:
        call, name = Call.of(socket), socket.query_params.get("model")
        model = await self._models.find(name, call.metadata)
        await socket.accept(_SUBPROTOCOL if _SUBPROTOCOL in socket.scope["subprotocols"] else None)
        send, names = partial(_send, socket), Names()
        with suppress(WebSocketDisconnect):
            try:
                async with call.drain.limited(), self._generation.live(call) as live:
                    connection = Connection(names, send, live, model, name, call.request_id, call.charge)
                    await connection.run(_messages(socket))
            except WebSocketDisconnect:
                raise
            except Exception as error:
                told = call.outcome.refuse(error, call.method)
                await send(error_event(names, told, None))
                leaving = isinstance(told, Unavailable) and told.stage == "gateway"
                await socket.close(_SERVICE_RESTART if leaving else _INTERNAL_ERROR)


async def _send(socket: WebSocket, event: ServerEvent) -> None:
    """Deltas are small; other events may have a picture, or what the client wrote."""
    is_small = event["type"].endswith(".delta")
    await socket.send_text(dumped(event) if is_small else await asyncio.to_thread(dumped, event))


async def _messages(socket: WebSocket) -> AsyncIterator[bytes]:
    """Until the client leaves. The server gives all messages as bytes, see `WebSocketProtocol`."""
    while (message := await socket.receive())["type"] != "websocket.disconnect":
        yield message["bytes"]
