"""The body of a request, bounded while it is read, and work that ends when the client leaves."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from framesieve.common.contract.errors import InvalidRequest
from framesieve.common.contract.limits import REQUEST_OVERHEAD_BYTES
from framesieve.common.security.quotas import Charge
from framesieve.services.gateway.http.errors import ENCODINGS, TooLarge, UnsupportedEncoding
from framesieve.services.gateway.http.request_guard import ClientLeft

_PIECE_BYTES = 2**20
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32

T = TypeVar("T")


def body_limit(max_inline_bytes: int) -> int:
    """The most bytes of a body, or of a WebSocket's message, in which media are base64."""
    return max_inline_bytes * 4 // 3 + REQUEST_OVERHEAD_BYTES


def bounded(request: Request, limit_bytes: int, charge: Charge) -> Request:
    """The request with its body decompressed, which raises TooLarge beyond its limit, UnsupportedEncoding, and
    InvalidRequest where it is not compressed as it says. `charge` is told the size of each piece."""
    _check_announced(request, limit_bytes)
    pieces, received_bytes = _decompressed(request, limit_bytes), 0

    async def receive() -> Message:
        nonlocal received_bytes
        piece = await anext(pieces, None)
        if piece is None:
            return {"type": "http.request", "body": b"", "more_body": False}
        received_bytes += len(piece)
        if received_bytes > limit_bytes:
            raise TooLarge(f"the body has more than the {limit_bytes} bytes that are allowed")
        charge(len(piece))
        return {"type": "http.request", "body": piece, "more_body": True}

    return Request(request.scope, receive)


async def _decompressed(request: Request, limit_bytes: int) -> AsyncIterator[bytes]:
    """The body in pieces; those of a compressed one have at most _PIECE_BYTES, and it has at most `limit_bytes` itself:
    it may hold nothing for ever."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        async for piece in request.stream():
            yield piece
        return
    if encoding not in ENCODINGS:
        raise UnsupportedEncoding(field="Content-Encoding", limit=" or ".join(ENCODINGS), value=encoding)
    inflater = zlib.decompressobj(_GZIP_OR_ZLIB)
    try:
        async for compressed in request.stream():
            limit_bytes -= len(compressed)
            if limit_bytes < 0:
                raise TooLarge("the compressed body has more bytes than a body may have")
            while compressed:
                if inflater.eof:  # gzip allows another file here, each of which could be of no bytes
                    raise zlib.error("more follows its end")
                yield await asyncio.to_thread(inflater.decompress, compressed, _PIECE_BYTES)
                compressed = inflater.unconsumed_tail or inflater.unused_data
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {encoding}, as its Content-Encoding says: {error}") from None
    if not inflater.eof:
        raise InvalidRequest(f"the body ends before its {encoding} does")


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
