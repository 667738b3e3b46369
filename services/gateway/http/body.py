"""The body of a request, bounded while it is read, and work that ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from framesieve.common.contract.limits import REQUEST_OVERHEAD_BYTES
from framesieve.common.security.quotas import Charge
from framesieve.services.gateway.http.errors import TooLarge
from framesieve.services.gateway.http.request_guard import ClientLeft

T = TypeVar("T")


def body_limit(max_inline_bytes: int) -> int:
    """The most bytes of a body, or of a WebSocket's message, in which media are base64."""
    return max_inline_bytes * 4 // 3 + REQUEST_OVERHEAD_BYTES


def bounded(request: Request, limit_bytes: int, charge: Charge) -> Request:
    """The request with a body that raises TooLarge beyond its limit, and tells `charge` the size of each piece."""
    _check_announced(request, limit_bytes)
    received_bytes = 0

    async def receive() -> Message:
        nonlocal received_bytes
        message = await request.receive()
        size_bytes = len(message.get("body", b""))
        received_bytes += size_bytes
        if received_bytes > limit_bytes:
            raise TooLarge(f"the body has more than the {limit_bytes} bytes that are allowed")
        charge(size_bytes)
        return message

    return Request(request.scope, receive)


async def read_body(request: Request, limit_bytes: int, charge: Charge) -> bytearray:
    """The whole body. Raises what `bounded` raises, and ClientLeft."""
    body = bytearray()
    try:
        async for piece in bounded(request, limit_bytes, charge).stream():
            body += piece
    except ClientDisconnect as error:
        raise ClientLeft from error
    return body


def _check_announced(request: Request, limit_bytes: int) -> None:
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and int(announced) > limit_bytes:
        raise TooLarge(f"the body has {announced} bytes, at most {limit_bytes} are allowed")


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of the work, which is cancelled as soon as the client leaves. Raises ClientLeft then.

    The body must have been read.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeft
        return await working
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
