"""What happens around every request of ours: a request id, its outcome counted, and its error as a status."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from contextlib import aclosing, suppress
from typing import Any

import grpc
import structlog

from common.channels import DETAILS_KEY, REQUEST_ID_KEY, status_details, status_message
from common.contract.errors import FramesieveError, PeerContract, Unauthenticated, Unavailable
from common.security.quotas import ClientBudgets
from common.serving.parsing import parsed
from common.telemetry.metrics import MESSAGE_BYTES, REFUSALS, REQUEST_SECONDS, REQUESTS, REQUESTS_RUNNING
from common.telemetry.request_stats import RequestStats, add_request_stats, begin_request_stats
from common.telemetry.tracing import Tracer, begin_request

OUR_METHODS = "/framesieve."
MAX_REQUEST_ID_CHARACTERS = 128

_DO_NOT_RETRY = ("grpc-retry-pushback-ms", "-1")
# Whoever is cut off has so long to give up what it holds.
_CUT_OFF_S = 1.0

log = structlog.get_logger()

Behaviour = Callable[[Any, Any], AsyncGenerator[Any]]


class RequestInterceptor(grpc.aio.ServerInterceptor):
    """Wraps every streaming method of framesieve.v1; health and reflection pass untouched."""

    def __init__(self, budgets: ClientBudgets | None = None, tracer: Tracer | None = None) -> None:
        self._budgets = budgets or ClientBudgets()
        self._tracer = tracer
        self._running: set[asyncio.Task[Any]] = set()
        self._answering: set[asyncio.Task[Any]] = set()  # of these, those that wait for a response to be sent
        self._cut_off: set[asyncio.Task[Any]] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False

    async def drain(self, grace_s: float) -> int:
        """Refuses new requests and waits until those that run have ended, `grace_s` at most; then ends the rest.

        Returns how many these were. They are told so, but for those whose callers do not read.
        """
        self._draining = True
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), grace_s)
        self._cut_off = set(self._running)
        # Within gRPC, where responses are sent, nothing may be cancelled: no status could follow them.
        for task in self._cut_off - self._answering:
            task.cancel()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), _CUT_OFF_S)
        return len(self._cut_off)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(OUR_METHODS):
            return handler
        _, service, name = method.split("/")
        parse = _parse_weighed(handler.request_deserializer, name)
        behaviour = self._budgets.limited(parsed(handler, parse))
        # As a stream, whatever the method is: of a single request, gRPC holds the bytes until the call ends.
        return grpc.stream_stream_rpc_method_handler(
            _written(guarded(self._drained(behaviour, stage_of(service)), method, self._tracer)),
            response_serializer=_serialize_weighed(handler.response_serializer, name),
        )

    def _drained(self, behaviour: Behaviour, stage: str) -> Behaviour:
        async def drained(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any]:
            if self._draining:
                raise Unavailable(f"{stage} is draining", stage)
            task = asyncio.current_task()
            assert task is not None
            self._running.add(task)
            self._idle.clear()
            over = Unavailable(f"{stage} is draining, and the time to finish is over", stage)
            try:
                async with aclosing(behaviour(requests, context)) as responses:
                    async for response in responses:
                        self._answering.add(task)
                        yield response
                        self._answering.discard(task)
                        if task in self._cut_off:
                            raise over
            except asyncio.CancelledError:
                if task not in self._cut_off:
                    raise
                task.uncancel()
                raise over from None
            except Unauthenticated as error:  # it is not the caller's token that is refused up there
                raise PeerContract("an upstream service does not know the token of --upstream-token-file") from error
            finally:
                self._answering.discard(task)
                self._running.discard(task)
                if not self._running:
                    self._idle.set()

        return drained


def _written(behaviour: Behaviour) -> Callable[[Any, Any], Coroutine[Any, Any, None]]:
    """Writes what is yielded: who leaves without reading is cancelled like others, where gRPC would log a traceback."""

    async def written(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        async with aclosing(behaviour(requests, context)) as responses:
            async for response in responses:
                try:
                    await context.write(response)
                except grpc.aio.InternalError as error:
                    raise asyncio.CancelledError from error

    return written


def _parse_weighed(parse: Any, method: str) -> Callable[[bytes], Any]:
    def weighed(data: bytes) -> Any:
        MESSAGE_BYTES.labels(method, "received").inc(len(data))
        add_request_stats(received_bytes=len(data))
        return parse(data)

    return weighed


def _serialize_weighed(serialize: Any, method: str) -> Callable[[Any], bytes]:
    def weighed(response: Any) -> bytes:
        data: bytes = serialize(response)
        MESSAGE_BYTES.labels(method, "sent").inc(len(data))
        add_request_stats(sent_bytes=len(data))
        return data

    return weighed


def guarded(behaviour: Behaviour, path: str, tracer: Tracer | None = None) -> Behaviour:
    """The same behaviour with a request id, its outcome counted and logged, and a status for whatever it raises."""
    _, service, method = path.split("/")
    stage = stage_of(service)

    async def guarded(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncGenerator[Any]:
        metadata = dict(context.invocation_metadata() or ())
        structlog.contextvars.bind_contextvars(request_id=_request_id(metadata), method=method)
        sizes, span = begin_request_stats(), begin_request(tracer, path, metadata)
        start, code = time.perf_counter(), "OK"
        refusal: FramesieveError | None = None
        REQUESTS_RUNNING.labels(method).inc()
        log.debug("request began")
        try:
            async with aclosing(behaviour(requests, context)) as responses:
                async for response in responses:
                    yield response
        except (asyncio.CancelledError, GeneratorExit):
            left_s = context.time_remaining()
            code = "DEADLINE_EXCEEDED" if left_s is not None and left_s <= 0 else "CANCELLED"
            raise
        except FramesieveError as error:
            code, refusal = error.status, error
            if isinstance(error, PeerContract):
                log.error("peer broke the contract", error=status_message(error))
                refusal = PeerContract(f"a peer of {method} broke the contract, request id {bound_request_id()}")
            await _refuse(context, refusal, method, stage)
        except Exception:
            code, refusal = (
                "INTERNAL",
                FramesieveError(f"an internal error in {method}, request id {bound_request_id()}"),
            )
            log.exception("bug")
            await _refuse(context, refusal, method, stage)
        finally:
            REQUESTS_RUNNING.labels(method).dec()
            REQUESTS.labels(method, code).inc()
            seconds = time.perf_counter() - start
            REQUEST_SECONDS.labels(method).observe(seconds)
            _tell_end(code, refusal, seconds, sizes)
            if span is not None:
                span.end(code, None if code == "OK" else refusal.reason if refusal else code, sizes)

    return guarded


def _tell_end(code: str, refusal: FramesieveError | None, seconds: float, sizes: RequestStats) -> None:
    told = {"code": code, "seconds": round(seconds, 6), **sizes}
    if refusal is None:
        log.info("request ended", **told)
        return
    notes = getattr(refusal, "__notes__", [])
    upstream = {"upstream": notes} if notes else {}
    log.warning("request ended", reason=refusal.reason, error=status_message(refusal), **upstream, **told)


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], error: FramesieveError, method: str, stage: str) -> None:
    REFUSALS.labels(method, error.reason).inc()
    details: tuple[tuple[str, str | bytes], ...] = ((DETAILS_KEY, status_details(error).SerializeToString()),)
    if isinstance(error, Unavailable) and error.stage != stage:
        # What is gone is further up, and this service has tried it again: another of its replicas has no more luck.
        details = (*details, _DO_NOT_RETRY)
    with suppress(grpc.aio.InternalError):  # who is refused has left meanwhile, and nobody is there to be told
        await context.abort(grpc.StatusCode[error.status], status_message(error), trailing_metadata=details)


def stage_of(service: str) -> str:
    """encoder, of framesieve.v1.EncoderService."""
    return service.rsplit(".", 1)[-1].removesuffix("Service").lower()


def is_request_id(given: str) -> bool:
    """Whether a caller may name a request so: 1 to 128 printable ASCII characters."""
    return given.isascii() and given.isprintable() and 0 < len(given) <= MAX_REQUEST_ID_CHARACTERS


def bound_request_id() -> str:
    """The running request's: the call's own, or the one that its message names."""
    return str(structlog.contextvars.get_contextvars()["request_id"])


def _request_id(metadata: Mapping[str, str | bytes]) -> str:
    """The caller's, if it is one; else a new one."""
    given = metadata.get(REQUEST_ID_KEY, "")
    return given if isinstance(given, str) and is_request_id(given) else uuid.uuid4().hex
