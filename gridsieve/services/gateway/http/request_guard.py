"""What surrounds each request: its id, client, quota, metrics, log line and span, and a status for every error.

RequestGuard     for the methods of METHODS; health, metrics and the page pass unseen, from the pages that may call
  router         finds the endpoint
    endpoint     raises GridsieveErrors until it has begun its response
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import unquote

import structlog
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gridsieve.client.client import Metadata
from gridsieve.common.contract.errors import Unauthenticated, Unavailable
from gridsieve.common.security.quotas import Charge, ClientQuotas
from gridsieve.common.security.tokens import AUTHORIZATION_KEY, TOKEN, Tokens
from gridsieve.common.serving.observed import Outcome, bound_request_id, observed
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.common.telemetry.metrics import MESSAGE_BYTES
from gridsieve.common.telemetry.tracing import passed_on_trace
from gridsieve.services.gateway.http.drain import Drain
from gridsieve.services.gateway.http.errors import ForbiddenOrigin, body_of, headers_of, of_router, status_of
from gridsieve.services.gateway.http.origins import Origins
from gridsieve.services.gateway.http.tickets import Tickets

METHODS = {
    "/v1/chat/completions": "ChatCompletions",
    "/v1/responses": "Responses",
    "/v1/embeddings": "Embeddings",
    "/v1/rerank": "Rerank",
    "/v2/rerank": "Rerank",
    "/v1/score": "Score",
    "/v1/models": "ListModels",
    "/v1/realtime": "Realtime",
    "/v1/files": "Files",
    "/v1/batches": "Batches",
    "/v1/gridsieve/kept": "Kept",
    "/v1/gridsieve/live": "Live",
    "/v1/gridsieve/moments": "Moments",
}
"""The methods in metrics and logs, by the path that they begin with."""

FILMS = "/v1/gridsieve/moments/films/"
"""Before a ticket, with which a film is read."""

_REQUEST_ID = b"x-request-id"
_BEGINS = ("http.response.start", "websocket.accept", "websocket.http.response.start")
_SUBPROTOCOL_KEY = "openai-insecure-api-key."
_CALL = "gridsieve"


class ClientLeft(Exception):
    """The client closed its connection before its response was complete."""


@dataclass(frozen=True, slots=True)
class Call:
    """The running request, for its endpoint.

    client: the name of its token, else its address.
    owner: of uploaded files and stored responses, sha256 of the caller's Authorization header.
    charge: counts bytes of the body for the client's quota; a negative number gives back those of a message that was
    served. charge_stored: counts bytes that did not come with the request.
    metadata: of calls to generation. outcome: to be set where an error comes after the response has begun. drain: what
    must end such a response before its time.
    """

    request_id: str
    method: str
    client: str
    owner: str
    charge: Charge
    charge_stored: Charge
    metadata: Metadata
    outcome: Outcome
    drain: Drain

    @classmethod
    def of(cls, request: HTTPConnection) -> Call:
        call = request.scope[_CALL]
        assert isinstance(call, cls)
        return call


class RequestGuard:
    """tokens: those that callers must send; None admits everybody, and generation may still refuse.
    tickets: those that requests for films carry in place of tokens."""

    def __init__(
        self,
        app: ASGIApp,
        origins: Origins,
        quotas: ClientQuotas,
        tokens: Tokens | None,
        tickets: Tickets,
        passes_tokens_on: bool,
    ) -> None:
        self._app = app
        self._origins = origins
        self._quotas = quotas
        self._tokens = tokens
        self._tickets = tickets
        self._passes_tokens_on = passes_tokens_on
        self.drain = Drain()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start = route_of(scope["path"]) if scope["type"] in ("http", "websocket") else None
        if start is None:
            await self._answer_unseen(scope, receive, send)
            return
        method = METHODS[start]
        headers = dict(Headers(scope=scope))
        verb = scope.get("method", "GET")
        if scope["type"] == "websocket" and AUTHORIZATION_KEY not in headers:
            headers |= _key_of(scope["subprotocols"])
        called = {"http.request.method": verb, "http.route": start}
        with self.drain.running(), observed(method, f"{verb} {start}", called, headers) as outcome:
            response = _Response(send)
            try:
                await self._answer(scope, receive, response, headers, outcome, method)
            except asyncio.CancelledError:
                outcome.code = "CANCELLED"
                raise
            except ClientLeft:
                outcome.code = "CANCELLED"
            except Exception as error:
                if isinstance(error, HTTPException):
                    error = of_router(error, scope)
                told = outcome.refuse(error, method)
                if not response.begun:
                    answer = JSONResponse(body_of(told), status_of(told), headers_of(told))
                    await answer(scope, receive, response)
            finally:
                MESSAGE_BYTES.labels(method, "sent").inc(response.sent_bytes)
                add_request_stats(sent_bytes=response.sent_bytes)

    async def _answer_unseen(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._origins.check(Headers(scope=scope))
            await self._app({**scope, "app": self}, receive, send)
        except (HTTPException, ForbiddenOrigin) as error:
            told = of_router(error, scope) if isinstance(error, HTTPException) else error
            await JSONResponse(body_of(told), status_of(told))(scope, receive, send)

    async def _answer(
        self,
        scope: Scope,
        receive: Receive,
        response: _Response,
        headers: Mapping[str, str],
        outcome: Outcome,
        method: str,
    ) -> None:
        self._origins.check(headers)
        if self.drain.begun:
            raise Unavailable("gateway is draining", "gateway")
        client = self._client_of(scope, headers)
        token = headers.get(AUTHORIZATION_KEY)
        passed_on = ((AUTHORIZATION_KEY, token),) if token and self._passes_tokens_on else ()
        with self._quotas.request(client) as charge:
            metadata = (*passed_on_trace(), *passed_on)
            owner = hashlib.sha256((token or "").encode()).hexdigest()
            scope["app"] = self  # the router raises HTTPException instead of answering in plain text
            scope[_CALL] = Call(
                bound_request_id(),
                method,
                client,
                owner,
                _counted(charge, method),
                charge,
                metadata,
                outcome,
                self.drain,
            )
            async with self.drain.limited() as limit:
                response.on_begin = partial(self.drain.lift, limit)
                await self._app(scope, receive, response)

    def _client_of(self, scope: Scope, headers: Mapping[str, str]) -> str:
        """The name of the token, or the client of a film's ticket, else the address. Raises Unauthenticated."""
        if scope["path"].startswith(FILMS):
            client = self._tickets.read(scope["path"].removeprefix(FILMS)).client
        elif self._tokens is not None:
            name = self._tokens.name_of(headers.get(AUTHORIZATION_KEY, ""))
            if name is None:
                raise Unauthenticated("the request must carry a valid bearer token")
            client = name
        else:
            return str(scope["client"][0]) if scope.get("client") else "unix:"
        if self._tokens is not None:
            structlog.contextvars.bind_contextvars(client=client)
        return client


class _Response:
    """Sends a response, with the request's id as a header."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False
        self.on_begin: Callable[[], None] | None = None
        self.sent_bytes = 0

    async def __call__(self, message: Message) -> None:
        if message["type"] in _BEGINS:
            self.begun = True
            if self.on_begin:
                self.on_begin()
            message["headers"] = [*message["headers"], (_REQUEST_ID, bound_request_id().encode())]
        else:
            self.sent_bytes += len(message.get("body") or message.get("text") or b"")
        await self._send(message)


def route_of(path: str) -> str | None:
    """The key of METHODS that a path begins with; None where there is none."""
    return next((start for start in METHODS if path == start or path.startswith(f"{start}/")), None)


def _key_of(subprotocols: Sequence[str]) -> dict[str, str]:
    """The header of the token that a browser, which can set none, sends as a subprotocol, percent-encoded. One that no
    header could hold is ignored."""
    keys = [unquote(each.removeprefix(_SUBPROTOCOL_KEY)) for each in subprotocols if each.startswith(_SUBPROTOCOL_KEY)]
    return {AUTHORIZATION_KEY: f"Bearer {keys[0]}"} if keys and TOKEN.fullmatch(keys[0]) else {}


def _counted(charge: Charge, method: str) -> Charge:
    def counted(size_bytes: int) -> None:
        charge(size_bytes)
        if size_bytes > 0:
            MESSAGE_BYTES.labels(method, "received").inc(size_bytes)
            add_request_stats(received_bytes=size_bytes)

    return counted
