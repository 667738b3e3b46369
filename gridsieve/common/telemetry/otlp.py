"""Export of spans by OTLP over gRPC. OpenTelemetry's SDK (the extra `otel`) and its OTEL_… variables set it up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from importlib.metadata import version

import structlog
from opentelemetry import trace

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# Time to send the last spans when a service stops, so that an unreachable collector does not delay the exit.
_FLUSH_S = 2.0

log = structlog.get_logger()


def export_spans(service: str) -> Callable[[], None]:
    """Exports the spans of this process from now on, if a variable names an endpoint and the SDK is installed.

    Spans are sent in batches by a thread of the SDK, which drops spans when its queue is full.
    Returns a function that sends the last spans, in 2 s at most.
    """
    if not any(map(os.environ.get, _ENDPOINTS)):
        return lambda: None
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        log.warning("no traces are sent: pip install 'gridsieve[otel]'", missing=error.name)
        return lambda: None
    own = Resource({"service.name": f"gridsieve-{service}", "service.version": version("gridsieve")})
    provider = TracerProvider(resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)

    def close() -> None:
        closing = threading.Thread(target=provider.shutdown, daemon=True)
        closing.start()
        closing.join(_FLUSH_S)

    return close
