"""What surrounds each request of gridsieve.v1: its caller's token, request id, metrics, logs, traces, quotas, parsing,
and its status.

Layers of a call, from the outside, once its token is known:

    _written      writes each response
    guarded       request id, metrics, log line, span; turns an error into a status
    _limited      counts the requests and bytes of the client; refuses and cancels requests while the service drains
    _answered     calls the servicer's own method with parsed requests
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from gridsieve.common.channels import DO_NOT_RETRY, PART_KEY, REPLICA_KEY, REQUEST_ID_KEY
from gridsieve.common.contract.errors import (
    GridsieveError,
    InvalidRequest,
    PeerContract,
    Unauthenticated,
    Unavailable,
)
from gridsieve.common.security.credentials import NO_CREDENTIALS, Credentials
from gridsieve.common.security.quotas import Charge, ClientQuotas, client_of
from gridsieve.common.security.tokens import AUTHORIZATION_KEY, Tokens
from gridsieve.common.serving.observed import observed
from gridsieve.common.serving.status import DETAILS_KEY, status_details, status_message
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.common.telemetry.metrics import MESSAGE_BYTES
from gridsieve.common.telemetry.tracing import passed_on_trace

_OUR_METHODS = "/gridsieve."
_HEALTH_METHODS = "/grpc.health.v1.Health/"
# Their requests come as long as a camera films: each is done with once the next one is read, or counted by the service.
_FILMING = frozenset({"Live", "Watch"})
# Services call them for a session, of which there is a line in generation's log.
_PARTS = frozenset({"Encode", "Preprocess", "Watch"})
_PORTS = {
    "/gridsieve.v1.PreprocessingService/Preprocess": 50051,
    "/gridsieve.v1.EncoderService/Encode": 50052,
    "/gridsieve.v1.GenerationService/Generate": 50053,
}
_REPLICA = (REPLICA_KEY, secrets.token_hex(8))
# Time that cancelled requests get to release what they hold, at the end of a drain.
_CANCEL_S = 1.0
# When a caller disappears or its deadline passes, gRPC ends the request stream shortly before it cancels the handler.
_CANCELLED_S = 0.2

Behaviour = Callable[[Any, Any], AsyncGenerator[Any]]


class RequestInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every method of gridsieve.v1. Methods of health and reflection stay as they are.

    stage: the name of this service, for callers of another service's method. tokens: of which callers must send one,
    before anything of their request is read; None admits everybody. Health needs no token, because probes have none.
    """

    def __init__(self, quotas: ClientQuotas, stage: str, tokens: Tokens | None) -> None:
        self._stage = stage
        self._tokens = tokens
        self._quotas = quotas
        self._running: set[asyncio.Task[Any]] = set()
        self._sending: set[asyncio.Task[Any]] = set()  # those of the running that wait for a response to be sent
        self._cut_off: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def drain(self, grace_s: float) -> int:
        """Refuses new requests, waits up to `grace_s` for running ones, and then cancels the rest.

        Returns the number of cancelled requests. They end with UNAVAILABLE, unless their caller does not read.
        """
        self._draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        self._cut_off = set(self._running)
        # A task that is inside gRPC's write must not be cancelled: gRPC could not send a status after it.
        for task in self._cut_off - self._sending:
            task.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), _CANCEL_S)
        return len(self._cut_off)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None and method not in _PORTS:
            return None
        if self._tokens and not method.startswith(_HEALTH_METHODS):
            shown = [value for key, value in handler_call_details.invocation_metadata or () if key == AUTHORIZATION_KEY]
            client = self._tokens.name_of(shown[0]) if len(shown) == 1 and isinstance(shown[0], str) else None
            if client is None:
                # A streaming handler for every method: it does not wait for the request.
                return grpc.stream_stream_rpc_method_handler(guarded(_without_token, method))
            structlog.contextvars.bind_contextvars(client=client)
        if handler is None:
            return _elsewhere(self._stage, method)
        if not method.startswith(_OUR_METHODS):
            return handler
        _, _, name = method.split("/")
        # Every method is served as a stream: gRPC keeps the bytes of a unary request until the call ends.
        return grpc.stream_stream_rpc_method_handler(
            _written(guarded(self._limited(handler, name), method)),
            response_serializer=_count_sent(handler.response_serializer, name),
        )

    def _limited(self, handler: Any, method: str) -> Behaviour:
        async def limited(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any]:
            if self._draining:
                raise Unavailable(f"{self._stage} is draining", self._stage)
            task = asyncio.current_task()
            assert task is not None
            self._running.add(task)
            self._idle.clear()
            too_late = Unavailable(f"{self._stage} is draining, and its grace period is over", self._stage)
            try:
                with self._quotas.request(client_of(context)) as charge:
                    counted = (lambda _: None) if method in _FILMING else charge
                    requests = _Requests(context, handler.request_deserializer, method, counted)
                    async with aclosing(await _answered(handler, requests, context)) as responses:
                        async for response in responses:
                            self._sending.add(task)
                            yield response
                            self._sending.discard(task)
                            if task in self._cut_off:
                                raise too_late
            except asyncio.CancelledError:
                if task not in self._cut_off:
                    raise
                task.uncancel()
                raise too_late from None
            except Unauthenticated as error:  # upstream refused our token, not the caller's
                raise PeerContract("an upstream service does not accept the token of --upstream-token-file") from error
            finally:
                self._sending.discard(task)
                self._running.discard(task)
                if not self._running:
                    self._idle.set()

        return limited


async def _answered(handler: Any, requests: _Requests, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """The responses of an RpcMethodHandler's own method."""
    if handler.request_streaming:
        return handler.stream_stream(requests, context)
    request = await anext(requests, None)
    if request is None:
        await asyncio.sleep(_CANCELLED_S)
        raise InvalidRequest("the call ended before its request arrived")
    if handler.response_streaming:
        return handler.unary_stream(request, context)
    return _single(handler.unary_unary(request, context))


async def _single(response: Awaitable[Any]) -> AsyncGenerator[Any]:
    yield await response


def _without_token(requests: Any, context: Any) -> AsyncGenerator[Any]:
    raise Unauthenticated("the call must carry a valid bearer token")


def _elsewhere(stage: str, method: str) -> grpc.RpcMethodHandler[Any, Any]:
    """Refuses a method of another service. Only known methods: each gets a label in the metrics."""
    _, service, name = method.split("/")
    message = (
        f"this is the {stage} service, which has no method {name}: {stage_of(service)} listens at another address, by "
        f"default on port {_PORTS[method]}"
    )

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, message)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _written(behaviour: Behaviour) -> Callable[[Any, Any], Coroutine[Any, Any, None]]:
    """Writes what is yielded. For generators gRPC logs a traceback when a caller disconnects without reading."""

    async def written(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with aclosing(behaviour(requests, context)) as responses:
            async for response in responses:
                try:
                    await context.write(response)
                except grpc.aio.InternalError as error:
                    raise asyncio.CancelledError from error

    return written


# --- parsing ----------------------------------------------------------------------------------------------------
#
# Requests are parsed inside the call, so that malformed bytes end it with INVALID_ARGUMENT. gRPC itself would answer
# UNKNOWN with the parser's class name. Bytes are dropped once parsed: they may hold media, and the call runs for as
# long as its answer takes.


class _Requests:
    """The parsed requests of a call. It keeps no bytes: gRPC's own iterator, and a generator, would keep the last.

    charge: counts the bytes of each request for its client.
    """

    def __init__(
        self, context: grpc.aio.ServicerContext[Any, Any], parse: Callable[[bytes], Any], method: str, charge: Charge
    ) -> None:
        self._context, self._parse, self._charge = context, parse, charge
        self._received = MESSAGE_BYTES.labels(method, "received")

    def __aiter__(self) -> _Requests:
        return self

    async def __anext__(self) -> Any:
        data = await self._context.read()
        if data is grpc.aio.EOF:
            raise StopAsyncIteration
        self._charge(len(data))
        self._received.inc(len(data))
        add_request_stats(received_bytes=len(data))
        try:
            return self._parse(data)
        except DecodeError as error:
            text = f"a request of {len(data)} bytes cannot be parsed as a message of this method"
            raise InvalidRequest(text) from error


def _count_sent(serialize: Any, method: str) -> Callable[[Any], bytes]:
    sent = MESSAGE_BYTES.labels(method, "sent")  # looked up once: each token is a message

    def counted(response: Any) -> bytes:
        data: bytes = serialize(response)
        sent.inc(len(data))
        add_request_stats(sent_bytes=len(data))
        return data

    return counted


# --- outcome ----------------------------------------------------------------------------------------------------


def guarded(behaviour: Behaviour, path: str) -> Behaviour:
    """The behaviour with a request id, metrics, a log line, a span, and a status for every error it raises."""
    _, service, method = path.split("/")
    stage = stage_of(service)

    async def guarded(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any]:
        called = {"rpc.system.name": "grpc", "rpc.method": path[1:]}
        told = dict(context.invocation_metadata() or ())
        with observed(method, path[1:], called, told, part=method in _PARTS and PART_KEY in told) as outcome:
            try:
                async with aclosing(behaviour(requests, context)) as responses:
                    async for response in responses:
                        yield response
            except (asyncio.CancelledError, GeneratorExit):
                left_s = context.time_remaining()
                outcome.code = "DEADLINE_EXCEEDED" if left_s is not None and left_s <= 0 else "CANCELLED"
                raise
            except Exception as error:
                await _refuse(context, outcome.refuse(error, method), stage)

    return guarded


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], error: GridsieveError, stage: str) -> None:
    details: tuple[tuple[str, str | bytes], ...] = (_REPLICA, (DETAILS_KEY, status_details(error).SerializeToString()))
    if isinstance(error, Unavailable) and error.stage != stage:
        # A service further upstream is gone, and this service has retried it: its other replicas would fail as well.
        details = (*details, DO_NOT_RETRY)
    with suppress(grpc.aio.InternalError):  # the caller has disconnected
        await context.abort(grpc.StatusCode[error.status], status_message(error), trailing_metadata=details)


def stage_of(service: str) -> str:
    """encoder, for gridsieve.v1.EncoderService."""
    return service.rsplit(".", 1)[-1].removesuffix("Service").lower()


def passed_on(
    context: grpc.aio.ServicerContext[Any, Any], credentials: Credentials = NO_CREDENTIALS, part: bool = False
) -> dict[str, Any]:
    """Keyword arguments of an upstream call: the caller's remaining time, its request id and trace, our own token.

    part: whether it is one of many of a session, as those are that such a call makes.
    """
    request_id = structlog.contextvars.get_contextvars().get("request_id", "")
    part = part or PART_KEY in dict(context.invocation_metadata() or ())
    parts = ((PART_KEY, "1"),) if part else ()
    metadata = ((REQUEST_ID_KEY, request_id), *parts, *passed_on_trace(), *credentials.metadata)
    return {"timeout": context.time_remaining(), "metadata": metadata}
