"""Sends the requests of a batch to the gateway itself, in this process: each has its own quota, metrics and log line.

Source: ASGI's HTTP specification, version 2.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import Message, Scope

from gridsieve.common.security.tokens import AUTHORIZATION_KEY
from gridsieve.jobs.lines import Line, Reply


class Calls:
    """Calls in the name of the caller of a request, with its token and address."""

    def __init__(self, request: Request) -> None:
        self._app = request.scope["app"]
        self._client, self._server = request.scope.get("client"), request.scope.get("server")
        token = request.headers.get(AUTHORIZATION_KEY)
        self._headers = {"content-type": "application/json"} | ({AUTHORIZATION_KEY: token} if token else {})

    async def ask(self, line: Line) -> Reply:
        """The reply to a request."""
        sent, begun, told = [line.body], [], bytearray()

        async def receive() -> Message:
            if sent:
                return {"type": "http.request", "body": sent.pop(), "more_body": False}
            await asyncio.Event().wait()  # this client leaves by cancelling the call
            raise AssertionError

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                begun.append(message)
            else:
                told.extend(message.get("body", b""))

        await self._app(self._scope(line), receive, send)
        headers, after_s = Headers(raw=begun[0]["headers"]), 1.0
        with suppress(ValueError):
            after_s = float(headers.get("retry-after", ""))
        return Reply(begun[0]["status"], headers.get("x-request-id", ""), json.loads(told), after_s)

    def _scope(self, line: Line) -> Scope:
        headers = MutableHeaders(self._headers | {"content-length": str(len(line.body))})
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": line.url,
            "raw_path": line.url.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": headers.raw,
            "client": self._client,
            "server": self._server,
        }
