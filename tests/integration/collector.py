"""A collector of traces: OTLP over gRPC on loopback. It keeps every span."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Status

from tests.served import served


@dataclass(frozen=True)
class Span:
    """A received span, ids in hexadecimal. service: the one that sent it, without "gridsieve-"."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    failed: bool
    attributes: dict[str, Any]

    def within(self, other: Span, slack_ns: int = 0) -> bool:
        return other.start_ns - slack_ns <= self.start_ns <= self.end_ns <= other.end_ns + slack_ns


@dataclass
class Collector(TraceServiceServicer):
    """address: for OTEL_EXPORTER_OTLP_ENDPOINT."""

    address: str = ""
    spans: list[Span] = field(default_factory=list)
    sent: bytes = b""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    async def Export(
        self, request: ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> ExportTraceServiceResponse:
        with self._lock:
            self.sent += request.SerializeToString()
            for resource in request.resource_spans:
                service = _values(resource.resource.attributes)["service.name"].removeprefix("gridsieve-")
                for span in (span for scope in resource.scope_spans for span in scope.spans):
                    trace, own, parent = (each.hex() for each in (span.trace_id, span.span_id, span.parent_span_id))
                    failed = span.status.code == Status.STATUS_CODE_ERROR
                    times_ns = span.start_time_unix_nano, span.end_time_unix_nano
                    values = _values(span.attributes)
                    self.spans.append(Span(service, span.name, trace, own, parent, *times_ns, failed, values))
        return ExportTraceServiceResponse()

    def of_request(self, request_id: str) -> list[Span]:
        """The spans of a request, ordered by start."""
        with self._lock:
            spans = [span for span in self.spans if span.attributes["gridsieve.request_id"] == request_id]
        return sorted(spans, key=lambda span: span.start_ns)


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    with served(partial(add_TraceServiceServicer_to_server, collector)) as address:
        collector.address = f"http://{address}"
        yield collector


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}
