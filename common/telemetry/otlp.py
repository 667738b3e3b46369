"""Spans sent to a collector by OTLP over gRPC. It alone imports OpenTelemetry, whose variables (OTEL_…) set it up."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from importlib.metadata import version
from time import monotonic_ns, time_ns

import structlog
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from common.telemetry.tracing import Attributes, Metadata

# What is left when a service stops is sent for so long: a collector that is gone keeps nobody waiting.
_FLUSH_S = 2.0
_PREFIX = "framesieve."

_W3C = TraceContextTextMapPropagator()


class OtlpTracer:
    """Batches spans, and sends them from a thread of its own; those for which its queue has no room are dropped."""

    def __init__(self, service: str) -> None:
        own = Resource({"service.name": f"framesieve-{service}", "service.version": version("framesieve")})
        resource = own.merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("framesieve")

    def begin(self, path: str, metadata: Mapping[str, str | bytes]) -> OtlpRequestSpan:
        return OtlpRequestSpan(self._tracer, path, metadata)

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_FLUSH_S)


class OtlpRequestSpan:
    """The caller's trace goes on in it, if there is one. Its stages may be told from any thread."""

    def __init__(self, tracer: trace.Tracer, path: str, metadata: Mapping[str, str | bytes]) -> None:
        self._tracer = tracer
        # One pair for all of its moments: what happens within it lies within it, whatever the wall clock does.
        self._began_ns, self._began_at_ns = monotonic_ns(), time_ns()
        method = path.removeprefix("/")
        parent = _W3C.extract({key: value for key, value in metadata.items() if isinstance(value, str)})
        self._span = tracer.start_span(
            method,
            parent,
            trace.SpanKind.SERVER,
            {"rpc.system.name": "grpc", "rpc.method": method},
            start_time=self._began_at_ns,
        )
        self._context = trace.set_span_in_context(self._span, parent)

    @property
    def metadata(self) -> Metadata:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        return tuple(carrier.items())

    def stage(self, name: str, began_ns: int, ended_ns: int, error: str | None, attributes: Attributes) -> None:
        began_ns = max(began_ns, self._began_ns)
        told = self._tracer.start_span(name, self._context, start_time=self._at_ns(began_ns))
        _finish(told, error, attributes, self._at_ns(max(began_ns, ended_ns)))

    def end(self, code: str, error: str | None, attributes: Attributes) -> None:
        self._span.set_attribute("rpc.response.status_code", code)
        _finish(self._span, error, attributes, self._at_ns(monotonic_ns()))

    def _at_ns(self, moment_ns: int) -> int:
        return self._began_at_ns + moment_ns - self._began_ns


def _finish(told: trace.Span, error: str | None, attributes: Attributes, at_ns: int) -> None:
    request_id = structlog.contextvars.get_contextvars().get("request_id", "")
    named = {"request_id": request_id, **attributes}
    told.set_attributes({_PREFIX + name: value for name, value in named.items()})
    if error is not None:
        told.set_attribute("error.type", error)
        told.set_status(trace.Status(trace.StatusCode.ERROR, error))
    told.end(at_ns)
