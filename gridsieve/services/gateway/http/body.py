"""The body of a request, bounded while it is read, and work that ends when the client leaves."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.limits import REQUEST_OVERHEAD_BYTES
from gridsieve.common.security.quotas import Charge
from gridsieve.services.gateway.http.errors import ENCODINGS, LARGER_BODIES, TooLarge, UnsupportedEncoding
from gridsieve.services.gateway.http.request_guard import ClientLeft

_PIECE_BYTES = 2**20
_GZIP_OR_ZLIB = zlib.MAX_WBITS | 32

T = TypeVar("T")


def inline_body_bytes(max_inline_bytes: int) -> int:
    """The most bytes of a body, or of a WebSocket's message, in which media are base64."""
    return max_inline_bytes * 4 // 3 + REQUEST_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class BodyLimit:
    """The most bytes of a body. setting: that it follows from, with its value. remedy: for what is larger."""

    size_bytes: int
    setting: str
    remedy: str

    @classmethod
    def inline(cls, max_inline_bytes: int) -> BodyLimit:
        """Of a question, whose media are base64."""
        return cls(inline_body_bytes(max_inline_bytes), f"--max-inline-bytes is {max_inline_bytes}", LARGER_BODIES)

    def check(self, size_bytes: int, about: str = "") -> None:
        """Raises TooLarge for more bytes."""
        if size_bytes > self.size_bytes:
            text = f"the body has {about}{size_bytes} bytes, at most {self.size_bytes} are allowed: {self.setting}"
            raise TooLarge(text, remedy=self.remedy)


def bounded(request: Request, limit: BodyLimit, charge: Charge) -> Request:
    """The request with its body decompressed, which raises TooLarge beyond its limit, UnsupportedEncoding, and
    InvalidRequest where it is not compressed as it says. `charge` is told the size of each piece."""
    limit.check(announced_bytes(request) or 0)
    pieces, received_bytes = _decompressed(request, limit), 0

    async def receive() -> Message:
        nonlocal received_bytes
        piece = await anext(pieces, None)
        if piece is None:
            return {"type": "http.request", "body": b"", "more_body": False}
        received_bytes += len(piece)
        limit.check(received_bytes, "at least ")
        charge(len(piece))
        return {"type": "http.request", "body": piece, "more_body": True}

    return Request(request.scope, receive)


def announced_bytes(request: Request) -> int | None:
    """Of the body as it is sent; None where the request does not tell."""
    announced = request.headers.get("content-length", "")
    return int(announced) if announced.isascii() and announced.isdigit() else None


async def _decompressed(request: Request, limit: BodyLimit) -> AsyncIterator[bytes]:
    """The body in pieces; those of a compressed one have at most _PIECE_BYTES, and it keeps to the limit itself: it may
    hold nothing for ever."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding == "identity":
        async for piece in request.stream():
            yield piece
        return
    if encoding not in ENCODINGS:
        raise UnsupportedEncoding(field="Content-Encoding", limit=" or ".join(ENCODINGS), value=encoding)
    inflater, received_bytes = zlib.decompressobj(_GZIP_OR_ZLIB), 0
    try:
        async for compressed in request.stream():
            received_bytes += len(compressed)
            limit.check(received_bytes, "at least ")
            while compressed:
                if inflater.eof:  # gzip allows another file here, each of which could be of no bytes
                    raise zlib.error("more follows its end")
                yield await asyncio.to_thread(inflater.decompress, compressed, _PIECE_BYTES)
                compressed = inflater.unconsumed_tail or inflater.unused_data
    except zlib.error as error:
        raise InvalidRequest(f"the body is not {encoding}, as its Content-Encoding says: {error}") from None
    if not inflater.eof:
        raise InvalidRequest(f"the body ends before its {encoding} does")


async def read_body(request: Request, limit: BodyLimit, charge: Charge) -> bytearray:
    """The whole body. Raises what `bounded` raises, and ClientLeft."""
    body = bytearray()
    try:
        async for piece in bounded(request, limit, charge).stream():
            body += piece
    except ClientDisconnect as error:
        raise ClientLeft from error
    return body


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
