"""Health as services tell it to whoever asks, without a token: Check says it once, Watch at every change.

Nobody is waited for: a watcher that does not read holds up neither the others nor the service. Strangers may ask, so a
request is small and watchers are counted. It does not know what makes a service well.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from common.budgets import client_of

NAME = "grpc.health.v1.Health"

# Of a request, which is a name. gRPC keeps it for as long as its call lasts.
MAX_REQUEST_BYTES = 256
# A channel watches once for each connection. Of one client, so that nobody takes the others' places.
MAX_WATCHERS = 4096
MAX_WATCHERS_PER_CLIENT = 1024

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Answer: TypeAlias = "health_pb2.HealthCheckResponse"


class Health:
    """Of the service as a whole, under each of its names; NOT_SERVING until it is told otherwise."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._status = health_pb2.HealthCheckResponse.NOT_SERVING
        self._changed = asyncio.Event()
        self._watchers: Counter[str] = Counter()

    @property
    def watchers(self) -> int:
        """How many watch, all clients together."""
        return self._watchers.total()

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

    async def _watch(self, request: bytes, context: Context) -> AsyncIterator[Answer]:
        """As the protocol has it, a name that is not known is answered so, and the call goes on."""
        known = await _name_of(request, context) in self._names
        client = client_of(context)
        if self.watchers >= MAX_WATCHERS or self._watchers[client] >= MAX_WATCHERS_PER_CLIENT:
            limits = f"at most {MAX_WATCHERS} may, of one client {MAX_WATCHERS_PER_CLIENT}"
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.watchers} watch, of {client} {self._watchers[client]}: {limits}",
            )
        with self._watching(client):
            told = None
            while True:
                changed = self._changed
                status = self._status if known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
                if status != told:
                    told = status
                    yield health_pb2.HealthCheckResponse(status=status)
                else:
                    await changed.wait()

    @contextmanager
    def _watching(self, client: str) -> Iterator[None]:
        self._watchers[client] += 1
        try:
            yield
        finally:
            self._watchers[client] -= 1
            if not self._watchers[client]:
                del self._watchers[client]


async def _name_of(request: bytes, context: Context) -> str:
    if len(request) > MAX_REQUEST_BYTES:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the request has {len(request)} bytes, one that asks for health may have {MAX_REQUEST_BYTES}",
        )
    try:
        return str(health_pb2.HealthCheckRequest.FromString(request).service)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request is no HealthCheckRequest")
        raise
