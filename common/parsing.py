"""Requests out of the bytes that came, within the call: bytes that are no message are refused like any wrong request.

gRPC's own way is UNKNOWN, with the parser's class in its text.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Callable
from typing import Any

from google.protobuf.message import DecodeError

from common.errors import InvalidRequest

Parse = Callable[[bytes], Any]


def parsed(handler: Any, parse: Parse) -> Callable[[Any, Any], AsyncIterator[Any]]:
    """The streaming behaviour of an RpcMethodHandler, for requests that are still bytes."""
    if handler.request_streaming:
        return lambda requests, context: handler.stream_stream(_each(requests, parse), context)
    return lambda request, context: handler.unary_stream(_message(request, parse), context)


async def _each(requests: AsyncIterable[bytes], parse: Parse) -> AsyncIterator[Any]:
    async for data in requests:
        yield _message(data, parse)


def _message(data: bytes, parse: Parse) -> Any:
    try:
        return parse(data)
    except DecodeError as error:
        raise InvalidRequest(f"a request of {len(data)} bytes is no message of this method") from error
