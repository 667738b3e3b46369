"""Authentication of callers by bearer token, before anything of their request is read.

Health needs no token, because probes have none. Quotas of clients are in `gridsieve.common.security.quotas`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import grpc
import structlog

from gridsieve.common.contract.errors import Unauthenticated
from gridsieve.common.security.tokens import AUTHORIZATION_KEY, Tokens
from gridsieve.common.serving.interceptors import guarded

_HEALTH_METHODS = "/grpc.health.v1.Health/"


class AuthenticationInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a known token, and binds the client's name to the context of the others."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith(_HEALTH_METHODS):
            return handler
        shown = [value for key, value in handler_call_details.invocation_metadata or () if key == AUTHORIZATION_KEY]
        name = self._tokens.name_of(shown[0]) if len(shown) == 1 and isinstance(shown[0], str) else None
        if name is None:
            # A streaming handler for every method: it does not wait for the request.
            return grpc.stream_stream_rpc_method_handler(guarded(_refuse, method))
        structlog.contextvars.bind_contextvars(client=name)
        return handler


def _refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any]:
    raise Unauthenticated("the call must carry a valid bearer token")
