"""What happens around every request of ours: a request id, its outcome counted, and its error as a status."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
import structlog

from common.channels import DETAILS_KEY, REQUEST_ID_KEY, status_details, status_message
from common.errors import FramesieveError, PeerContract
from common.parsing import parsed
from common.telemetry import REQUEST_SECONDS, REQUESTS, REQUESTS_RUNNING

OUR_METHODS = "/framesieve."
MAX_REQUEST_ID_CHARACTERS = 128

log = structlog.get_logger()

Behaviour = Callable[[Any, Any], AsyncIterator[Any]]


class RequestInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every streaming method of framesieve.v1; health and reflection pass untouched."""

    def __init__(self) -> None:
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def drain(self, grace_s: float) -> None:
        """Refuses new requests and waits until those that run have ended, `grace_s` at most."""
        self._draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OUR_METHODS):
            return handler
        streamed = handler.request_streaming
        wrap = grpc.stream_stream_rpc_method_handler if streamed else grpc.unary_stream_rpc_method_handler
        behaviour = parsed(handler)
        return wrap(
            self._counted(_guarded(behaviour, method.rsplit("/", 1)[-1])),
            response_serializer=handler.response_serializer,
        )

    def _counted(self, behaviour: Behaviour) -> Behaviour:
        async def counted(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            if self._draining:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
            self._running += 1
            self._idle.clear()
            try:
                async for response in behaviour(request, context):
                    yield response
            finally:
                self._running -= 1
                if not self._running:
                    self._idle.set()

        return counted


def _guarded(behaviour: Behaviour, method: str) -> Behaviour:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        structlog.contextvars.bind_contextvars(request_id=_request_id(context), method=method)
        start, code = time.perf_counter(), "OK"
        REQUESTS_RUNNING.labels(method).inc()
        try:
            async for response in behaviour(request, context):
                yield response
        except (asyncio.CancelledError, GeneratorExit):
            left_s = context.time_remaining()
            code = "DEADLINE_EXCEEDED" if left_s is not None and left_s <= 0 else "CANCELLED"
            raise
        except FramesieveError as error:
            code = error.status
            if isinstance(error, PeerContract):
                log.error("peer broke the contract", error=str(error))
                error = PeerContract(f"a peer of {method} broke the contract, request id {bound_request_id()}")
            await _refuse(context, error)
        except Exception as error:
            code = "INTERNAL"
            log.exception("bug", error=repr(error))
            await _refuse(context, FramesieveError(f"an internal error in {method}, request id {bound_request_id()}"))
        finally:
            REQUESTS_RUNNING.labels(method).dec()
            REQUESTS.labels(method, code).inc()
            REQUEST_SECONDS.labels(method).observe(time.perf_counter() - start)

    return guarded


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], error: FramesieveError) -> None:
    notes = getattr(error, "__notes__", [])
    log.warning("refused", reason=error.reason, error=status_message(error), **({"upstream": notes} if notes else {}))
    await context.abort(
        grpc.StatusCode[error.status],
        status_message(error),
        trailing_metadata=((DETAILS_KEY, status_details(error).SerializeToString()),),
    )


def is_request_id(given: str) -> bool:
    """Whether a caller may name a request so: 1 to 128 printable ASCII characters."""
    return given.isascii() and given.isprintable() and 0 < len(given) <= MAX_REQUEST_ID_CHARACTERS


def bound_request_id() -> str:
    """The running request's: the call's own, or the one that its message names."""
    return str(structlog.contextvars.get_contextvars()["request_id"])


def _request_id(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """The caller's, from metadata, if it is one; else a new one."""
    given = dict(context.invocation_metadata() or ()).get(REQUEST_ID_KEY, "")
    return given if isinstance(given, str) and is_request_id(given) else uuid.uuid4().hex
