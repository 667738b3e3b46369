"""Logs, and the metrics that all services share. A service's own metrics stand beside what they measure.

Names follow Prometheus' conventions: framesieve_…_seconds, _bytes, _total. No prompt text and no media is logged.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog
from prometheus_client import Counter, Gauge, Histogram, start_http_server

SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

REQUESTS = Counter("framesieve_requests_total", "Requests by how they ended", ["method", "code"])
REQUESTS_RUNNING = Gauge("framesieve_requests_running", "Requests now being served", ["method"])
REQUEST_SECONDS = Histogram(
    "framesieve_request_seconds", "Requests from arrival to end", ["method"], buckets=SECONDS_BUCKETS
)
STAGE_BUSY_SECONDS = Histogram(
    "framesieve_stage_busy_seconds",
    "Time spent working in a stage; stages of one request may overlap",
    ["stage"],
    buckets=SECONDS_BUCKETS,
)
STREAMED_BYTES = Counter("framesieve_streamed_bytes_total", "Array bytes sent or received", ["direction", "kind"])


@contextmanager
def busy(stage: str) -> Iterator[None]:
    """Observes the time spent inside as busy time of `stage`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        STAGE_BUSY_SECONDS.labels(stage).observe(time.perf_counter() - start)


def configure_logging(service: str, log_format: str) -> None:
    """Logs go to stderr, one line an event: JSON for machines, columns for a terminal."""
    console = log_format == "console" or (log_format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if console else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            *([] if console else [structlog.processors.format_exc_info]),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service)


def serve_metrics(port: int, host: str) -> None:
    """Serves /metrics from a thread of its own."""
    if port:
        start_http_server(port, host)
