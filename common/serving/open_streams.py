"""What methods beside a service's own may take, which no budget counts: so many open streams, so large a request.

The bounds are fixed, since what is asked there costs next to nothing; what is asked is the caller's affair.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from common.security.quotas import client_of

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
M = TypeVar("M", bound=Message)


class OpenStreams:
    """Counted while they are open, by client, so that nobody takes the others' places. doing: what they do there."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._open: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Of all clients together."""
        return self._open.total()

    @asynccontextmanager
    async def one_more(self, context: Context, most: int, most_per_client: int) -> AsyncIterator[None]:
        """While the context lasts. Ends the call with RESOURCE_EXHAUSTED where that is one too many.

        Within it, answers are written and not yielded: whoever leaves without reading them is cancelled like others,
        where gRPC would log an error with a traceback.
        """
        client = client_of(context)
        if self.count >= most or self._open[client] >= most_per_client:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.count} {self._doing}, of {client} {self._open[client]}: "
                f"at most {most} may, of one client {most_per_client}",
            )
        self._open[client] += 1
        try:
            yield
        except grpc.aio.InternalError as error:
            raise asyncio.CancelledError from error
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]


async def small(data: bytes, kind: type[M], max_bytes: int, asking: str, context: Context) -> M:
    """The request that these bytes hold. One that is too large is not even parsed: INVALID_ARGUMENT ends the call.

    asking: what requests of this kind do, for messages.
    """
    if len(data) > max_bytes:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the request has {len(data)} bytes, one that {asking} may have {max_bytes}",
        )
    try:
        return kind.FromString(data)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is no {kind.__name__}")
        raise
