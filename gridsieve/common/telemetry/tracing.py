"""Traces: a span for each request, with a child span for each stage that the request passes in this service.

    Generate          ├───────────────────────────────────────────────────────────┤
      Encode            ├────────────────────────────────────┤
        Preprocess        ├─────────────────────┤
          fetch, plan, decode, resize
        wait_for_encoder, encode, prune
      transfer, wait_for_prefill, prefill, generate

Spans are OpenTelemetry's, whose API does nothing until `otlp.py` installs its SDK. The W3C traceparent
of a call continues the caller's trace and is passed on upstream. Stage times are nanoseconds of the monotonic clock.
Attributes are numbers and names of ours, never text of a caller.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from time import monotonic_ns, time_ns
from typing import TypeAlias

import structlog
from opentelemetry import context, trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from gridsieve.common.contract.errors import GridsieveError

Attributes: TypeAlias = Mapping[str, str | int | float]
Metadata: TypeAlias = tuple[tuple[str, str], ...]

_PREFIX = "gridsieve."
_REQUEST = context.create_key("gridsieve-request")
_W3C = TraceContextTextMapPropagator()
_TRACER = trace.get_tracer("gridsieve")


class RequestSpan:
    """The span of the request of the running task, and the parent of its stages, from any thread of its context."""

    def __init__(self, name: str, attributes: Attributes, metadata: Mapping[str, str | bytes]) -> None:
        """metadata: of the call, or the headers of an HTTP request."""
        # One reading of both clocks per request: stages stay inside their request when the wall clock is adjusted.
        self._began_ns, self._began_at_ns = monotonic_ns(), time_ns()
        parent = _W3C.extract({key: value for key, value in metadata.items() if isinstance(value, str)})
        self._span = _TRACER.start_span(name, parent, trace.SpanKind.SERVER, attributes, start_time=self._began_at_ns)
        self._recording = self._span.is_recording()  # asked once: threads report stages after the request's span ended
        self._context = context.set_value(_REQUEST, self, trace.set_span_in_context(self._span, parent))
        context.attach(self._context)

    def stage(self, name: str, began_ns: int, ended_ns: int, error: str | None, attributes: Attributes) -> None:
        if self._recording:
            began_ns = max(began_ns, self._began_ns)
            stage = _TRACER.start_span(name, self._context, start_time=self._wall_ns(began_ns))
            _finish(stage, error, attributes, self._wall_ns(max(began_ns, ended_ns)))

    def end(self, code: str, error: str | None, attributes: Attributes) -> None:
        """code: name of the gRPC status. error: the reason, if it is not OK."""
        self._span.set_attribute("rpc.response.status_code", code)
        _finish(self._span, error, attributes, self._wall_ns(monotonic_ns()))

    def _wall_ns(self, monotonic: int) -> int:
        return self._began_at_ns + monotonic - self._began_ns


def passed_on_trace() -> Metadata:
    """Metadata of an upstream call of the running request: its spans become children of the request's span."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return tuple(carrier.items())


@contextmanager
def span(stage: str, **attributes: str | int | float) -> Iterator[None]:
    """Records the time inside as a stage of the running request. Does nothing outside of requests."""
    began_ns = monotonic_ns()
    try:
        yield
    except BaseException as error:
        record(stage, began_ns, monotonic_ns(), error, **attributes)
        raise
    record(stage, began_ns, monotonic_ns(), None, **attributes)


def record(
    stage: str, began_ns: int, ended_ns: int, error: BaseException | None = None, **attributes: str | int | float
) -> None:
    """Records a stage of the running request that is over. error: what ended the stage early."""
    running = context.get_value(_REQUEST)
    if isinstance(running, RequestSpan):
        running.stage(stage, began_ns, ended_ns, None if error is None else error_name(error), attributes)


def error_name(error: BaseException) -> str:
    """An error's reason or type. Its text may quote the caller and is left out."""
    return error.reason if isinstance(error, GridsieveError) else type(error).__name__


def _finish(span: trace.Span, error: str | None, attributes: Attributes, at_ns: int) -> None:
    request_id = structlog.contextvars.get_contextvars().get("request_id", "")
    named = {"request_id": request_id, **attributes}
    span.set_attributes({_PREFIX + name: value for name, value in named.items()})
    if error is not None:
        span.set_attribute("error.type", error)
        span.set_status(trace.Status(trace.StatusCode.ERROR, error))
    span.end(at_ns)
