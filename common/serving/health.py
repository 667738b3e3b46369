"""Health as services tell it to whoever asks, without a token: Check says it once, Watch at every change.

Nobody is waited for: a watcher that does not read holds up neither the others nor the service. Strangers may ask, so a
request is small and watchers are counted. It does not know what makes a service well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health_pb2

from common.serving.open_streams import Context, OpenStreams, small

NAME = "grpc.health.v1.Health"

# Of a request, which is a name. gRPC keeps it for as long as its call lasts.
MAX_REQUEST_BYTES = 256
# A channel watches once for each connection. Of one client, so that nobody takes the others' places.
MAX_WATCHERS = 4096
MAX_WATCHERS_PER_CLIENT = 1024

Answer: TypeAlias = "health_pb2.HealthCheckResponse"


class Health:
    """Of the service as a whole, under each of its names; NOT_SERVING until it is told otherwise."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._status = health_pb2.HealthCheckResponse.NOT_SERVING
        self._changed = asyncio.Event()
        self._watchers = OpenStreams("watch")

    @property
    def watchers(self) -> int:
        """How many watch, all clients together."""
        return self._watchers.count

    def add_to(self, server: grpc.aio.Server) -> None:
        """Serves it there. Requests come as bytes: one that is too large is not even parsed."""
        serialize = health_pb2.HealthCheckResponse.SerializeToString
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, response_serializer=serialize),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, response_serializer=serialize),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, methods),))

    def tell(self, well: bool) -> None:
        """From now on. Returns at once, whoever watches."""
        self._status = health_pb2.HealthCheckResponse.SERVING if well else health_pb2.HealthCheckResponse.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, request: bytes, context: Context) -> Answer:
        if await _name_of(request, context) not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=self._status)

    async def _watch(self, request: bytes, context: Context) -> None:
        """As the protocol has it, a name that is not known is answered so, and the call goes on."""
        known = await _name_of(request, context) in self._names
        async with self._watchers.one_more(context, MAX_WATCHERS, MAX_WATCHERS_PER_CLIENT):
            told = None
            while True:
                changed = self._changed
                status = self._status if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                if status != told:
                    told = status
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                else:
                    await changed.wait()


async def _name_of(request: bytes, context: Context) -> str:
    asked = await small(request, health_pb2.HealthCheckRequest, MAX_REQUEST_BYTES, "asks for health", context)
    return str(asked.service)
