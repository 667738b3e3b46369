"""Reflection as services answer it: which services there are, and the files of their messages.

grpc_reflection answers; here what it is asked is bounded, since no client's budget counts it. gRPC keeps a message that
is on its way, 20 MiB at most, for as long as its sender likes: so few streams are open at a time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

from common.serving.open_streams import Context, OpenStreams, small

NAME = reflection.SERVICE_NAME

# Of a request, which is a name, and comes back with the answer.
MAX_REQUEST_BYTES = 512
MAX_STREAMS = 16
MAX_STREAMS_PER_CLIENT = 8


class Reflection:
    """Of the services with these names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._servicer = reflection.aio.ReflectionServicer(names)
        self._streams = OpenStreams("reflect")

    @property
    def streams(self) -> int:
        """How many are open, of all clients together."""
        return self._streams.count

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves it there. Requests come as bytes: one that is too large is not even parsed."""
        serialize = ServerReflectionResponse.SerializeToString
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(self._reflect, response_serializer=serialize)
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, methods),))

    async def _reflect(self, _: object, context: Context) -> None:
        async with self._streams.one_more(context, MAX_STREAMS, MAX_STREAMS_PER_CLIENT):
            async for answer in self._servicer.ServerReflectionInfo(_requests(context), context):
                await context.write(answer)


async def _requests(context: Context) -> AsyncIterator[ServerReflectionRequest]:
    """As they come, none held: gRPC's own iterator holds the last."""
    while (data := await context.read()) is not grpc.aio.EOF:
        yield await small(data, ServerReflectionRequest, MAX_REQUEST_BYTES, "asks for reflection", context)
