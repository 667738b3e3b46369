"""GET /v1/realtime: a WebSocket, which is one live session. Access is checked before it is accepted."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

from starlette.websockets import WebSocket, WebSocketDisconnect

from framesieve.client.client import Metadata
from framesieve.common.channels import REQUEST_ID_KEY
from framesieve.common.contract.errors import Unavailable
from framesieve.services.gateway.http.request_guard import Call
from framesieve.services.gateway.models import Models
from framesieve.services.gateway.realtime.events import ServerEvent, error_event
from framesieve.services.gateway.realtime.live import Live
from framesieve.services.gateway.realtime.session import Session
from framesieve.v1.generation_pb2_grpc import GenerationServiceStub

_SUBPROTOCOL = "realtime"
_SERVICE_RESTART, _INTERNAL_ERROR = 1012, 1011
"""Codes with which a WebSocket is closed. Source: RFC 6455 section 7.4, and its registry."""


class Realtime:
    """metadata: of calls to generation, beside the caller's."""

    def __init__(self, generation: GenerationServiceStub, metadata: Metadata, models: Models) -> None:
        self._generation = generation
        self._metadata = metadata
        self._models = models

    async def endpoint(self, socket: WebSocket) -> None:
        call, name = Call.of(socket), socket.query_params.get("model")
        model = await self._models.find(name, call.metadata)
        live = Live(self._generation, ((REQUEST_ID_KEY, call.request_id), *call.metadata, *self._metadata))
        await socket.accept(_SUBPROTOCOL if _SUBPROTOCOL in socket.scope["subprotocols"] else None)
        session = Session(partial(_send, socket), live, model, name, call.request_id, call.charge)
        with suppress(WebSocketDisconnect):
            try:
                async with call.drain.limited():
                    await session.run(_messages(socket))
            except WebSocketDisconnect:
                raise
            except Exception as error:
                told = call.outcome.refuse(error, call.method)
                await _send(socket, error_event(session.names, told, None))
                leaving = isinstance(told, Unavailable) and told.stage == "gateway"
                await socket.close(_SERVICE_RESTART if leaving else _INTERNAL_ERROR)


async def _send(socket: WebSocket, event: ServerEvent) -> None:
    await socket.send_text(json.dumps(event, separators=(",", ":")))


async def _messages(socket: WebSocket) -> AsyncIterator[str]:
    """Until the client leaves."""
    while (message := await socket.receive())["type"] != "websocket.disconnect":
        text = message.get("text")
        yield message["bytes"].decode(errors="replace") if text is None else text
