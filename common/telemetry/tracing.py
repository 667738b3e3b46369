"""Traces: a span for each request, and below it one for each stage that it goes through in this service.

    Generate          ├───────────────────────────────────────────────────────────┤
      Encode            ├────────────────────────────────────┤
        Preprocess        ├─────────────────────┤
          fetch, plan, decode, resize
        wait_for_encoder, encode, prune
      transfer, wait_for_prefill, prefill, generate

A caller's trace goes on by W3C's traceparent, here and in what is called from here. Moments are nanoseconds of the
monotonic clock. Where nobody collects traces nothing here does anything, and OpenTelemetry is not imported: `otlp` does
that. Attributes are numbers and names of ours, never text of a caller's.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from time import monotonic_ns
from typing import Protocol, TypeAlias

import structlog

from common.contract.errors import FramesieveError

Attributes: TypeAlias = Mapping[str, str | int | float]
Metadata: TypeAlias = tuple[tuple[str, str], ...]

# OpenTelemetry's own, which says how its exporter is to be set up as well.
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

log = structlog.get_logger()


class RequestSpan(Protocol):
    """One request's, from its arrival on."""

    @property
    def metadata(self) -> Metadata:
        """What calls that it makes carry, so that their spans stand below it."""
        ...

    def stage(self, name: str, began_ns: int, ended_ns: int, error: str | None, attributes: Attributes) -> None: ...

    def end(self, code: str, error: str | None, attributes: Attributes) -> None:
        """code: the request's status, by gRPC's name. error: why, if it is not OK."""
        ...


class Tracer(Protocol):
    def begin(self, path: str, metadata: Mapping[str, str | bytes]) -> RequestSpan:
        """path: /package.Service/Method. metadata: what the caller sent with it."""
        ...

    def close(self) -> None:
        """Sends what has not been sent, for a moment at most."""
        ...


_RUNNING: ContextVar[RequestSpan | None] = ContextVar("request_span", default=None)


def open_tracer(service: str) -> Tracer | None:
    """One that sends spans where OpenTelemetry's variables say; None where they say nothing, or it is not installed."""
    if not any(map(os.environ.get, _ENDPOINTS)):
        return None
    try:
        from common.telemetry.otlp import OtlpTracer
    except ModuleNotFoundError as error:
        log.warning("no traces are sent: in the checkout, pip install -e '.[otel]'", missing=error.name)
        return None
    return OtlpTracer(service)


def begin_request(tracer: Tracer | None, path: str, metadata: Mapping[str, str | bytes]) -> RequestSpan | None:
    """The span of the request whose task this is; stages of it, and of tasks that it starts, stand below."""
    begun = None if tracer is None else tracer.begin(path, metadata)
    _RUNNING.set(begun)
    return begun


def passed_on_trace() -> Metadata:
    """Metadata of a call that the running request makes."""
    running = _RUNNING.get()
    return () if running is None else running.metadata


@contextmanager
def span(stage: str, **attributes: str | int | float) -> Iterator[None]:
    """What happens inside is `stage` of the running request; outside of requests it is nobody's."""
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
    """`stage` of the running request, once it is over. error: what it ended by, if it was not finished."""
    running = _RUNNING.get()
    if running is not None:
        running.stage(stage, began_ns, ended_ns, None if error is None else error_name(error), attributes)


def error_name(error: BaseException) -> str:
    """What of an error a trace may tell: its text may hold a caller's."""
    return error.reason if isinstance(error, FramesieveError) else type(error).__name__
