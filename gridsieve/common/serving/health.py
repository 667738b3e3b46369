"""grpc.health.v1.Health: Check returns the status once, Watch sends every change. It needs no token.

grpcio-health-checking has a servicer of its own, which is not used: its Watch holds the lock that `set` needs while it
writes, so that one client that does not read would block every change, and the drain of the service. Here `set_serving`
never waits. Since anybody may call it, the size of requests and the number of watchers are limited.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from gridsieve.common.security.quotas import client_of

NAME = "grpc.health.v1.Health"
READY = "ready"
"""The name of a service that is SERVING and reaches the services that it calls. It tells whether a request can be
answered. Supervisors of processes do not ask for it: a restart of this service would not help."""

# A request is a service's name. gRPC keeps its bytes until the call ends.
MAX_REQUEST_BYTES = 256
# A channel watches once per connection.
MAX_WATCHERS = 4096
MAX_WATCHERS_PER_CLIENT = 1024

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class Health:
    """The same status for each of `names`, and one for READY. All are NOT_SERVING at first.

    details: trailing metadata of Check.
    """

    def __init__(self, names: Sequence[str], details: Mapping[str, str] = MappingProxyType({})) -> None:
        self._details = tuple(details.items())
        self._statuses = dict.fromkeys((*names, READY), health_pb2.HealthCheckResponse.NOT_SERVING)
        self._changed = asyncio.Event()
        self._watchers: Counter[str] = Counter()

    @property
    def watchers(self) -> int:
        """Number of open Watch calls."""
        return self._watchers.total()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Adds both methods to a server. Their requests stay bytes, so that too large ones are not parsed."""
        serialize = health_pb2.HealthCheckResponse.SerializeToString
        methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Check": grpc.unary_unary_rpc_method_handler(self._check, response_serializer=serialize),
            "Watch": grpc.unary_stream_rpc_method_handler(self._watch, response_serializer=serialize),
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, methods),))

    def set_serving(self, serving: bool, ready: bool = False) -> None:
        """Changes the statuses to SERVING or NOT_SERVING. Returns at once; a task per watcher sends the change."""
        yes, no = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        statuses = {name: yes if serving and (ready or name != READY) else no for name in self._statuses}
        if statuses == self._statuses:
            return
        self._statuses = statuses
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, request: bytes, context: Context) -> health_pb2.HealthCheckResponse:
        if (name := await _service_of(request, context)) not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        context.set_trailing_metadata(self._details)
        return health_pb2.HealthCheckResponse(status=self._statuses[name])

    async def _watch(self, request: bytes, context: Context) -> None:
        """The protocol answers an unknown service with SERVICE_UNKNOWN and keeps the call open."""
        name = await _service_of(request, context)
        client = client_of(context)
        if self.watchers >= MAX_WATCHERS or self._watchers[client] >= MAX_WATCHERS_PER_CLIENT:
            await context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.watchers} Watch calls are open, {self._watchers[client]} of them by {client}; at most "
                f"{MAX_WATCHERS} are allowed in total, {MAX_WATCHERS_PER_CLIENT} per client",
            )
        with self._counted(client):
            sent = None
            while True:
                changed = self._changed
                status = self._statuses.get(name, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != sent:
                    sent = status
                    # Written, not yielded: gRPC logs a traceback for generators whose caller disconnects unread.
                    try:
                        await context.write(health_pb2.HealthCheckResponse(status=status))
                    except grpc.aio.InternalError as error:
                        raise asyncio.CancelledError from error
                else:
                    await changed.wait()

    @contextmanager
    def _counted(self, client: str) -> Iterator[None]:
        self._watchers[client] += 1
        try:
            yield
        finally:
            self._watchers[client] -= 1
            if not self._watchers[client]:
                del self._watchers[client]


async def _service_of(request: bytes, context: Context) -> str:
    """The service that a request names. Ends the call with INVALID_ARGUMENT for a malformed or too large request."""
    if len(request) > MAX_REQUEST_BYTES:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"the request has {len(request)} bytes, one that asks for health may have {MAX_REQUEST_BYTES}",
        )
    try:
        return str(health_pb2.HealthCheckRequest.FromString(request).service)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the request cannot be parsed as a HealthCheckRequest")
        raise
