"""Requests out of the bytes that came, within the call: bytes that are no message are refused like any wrong request.

gRPC's own way is UNKNOWN, with the parser's class in its text. Nothing here holds bytes once they are parsed: a request
may bring media, and runs for as long as its answer takes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from google.protobuf.message import DecodeError

from common.contract.errors import InvalidRequest

# A caller that vanishes, and a deadline that passes, end what is read a moment before they cancel who reads.
_CANCELLED_S = 0.2

Parse = Callable[[bytes], Any]
Behaviour = Callable[[Any, Any], AsyncGenerator[Any]]


def parsed(handler: Any, parse: Parse) -> Behaviour:
    """The streaming behaviour of an RpcMethodHandler, for an iterator of requests that are still bytes."""
    if handler.request_streaming:
        return lambda requests, context: handler.stream_stream(_Parsed(requests, parse), context)

    async def answer_the_only(requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[Any]:
        request = await anext(_Parsed(requests, parse), None)
        if request is None:
            await asyncio.sleep(_CANCELLED_S)
            raise InvalidRequest("the call ended without its request")
        answering = handler.unary_stream(request, context)
        del request
        async with aclosing(answering) as responses:
            async for response in responses:
                yield response

    return answer_the_only


class _Parsed:
    """Requests as they come; a generator would hold the bytes of the last until the next."""

    def __init__(self, requests: AsyncIterator[bytes], parse: Parse) -> None:
        self._requests = requests
        self._parse = parse

    def __aiter__(self) -> _Parsed:
        return self

    async def __anext__(self) -> Any:
        return _message(await anext(self._requests), self._parse)


def _message(data: bytes, parse: Parse) -> Any:
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidRequest(f"a request of {len(data)} bytes is no message of this method") from error
