"""What every service tells Prometheus; what a service tells beside it stands in its own `metrics.py`.

Names follow Prometheus' conventions: framesieve_…_seconds, _bytes, _total. Labels take values out of small sets that
are known when a service starts, never what a caller sends, and each is there from then on: the first event counts only
as a rise from 0. docs/metrics.md lists them all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from prometheus_client import Counter, Gauge, Histogram

from common.checkpoint import Checkpoint
from common.contract.errors import FramesieveError

# From one message to a long video that waits its turn. Percentiles between buckets are estimates: at most 2.5 apart.
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
# Of what happens once a token, where twice as slow is noticed: 2 apart, from a tiny model's to a stalled one's.
FINE_SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2, 4)

BUILD_INFO = Gauge("framesieve_build_info", "Always 1; which release this is", ["service", "version"])
MODEL_INFO = Gauge(
    "framesieve_model_info",
    "Always 1; which checkpoint is served: all services need the same fingerprint",
    ["model", "family", "fingerprint", "dtype", "device"],
)
SERVING = Gauge("framesieve_serving", "1 while health says SERVING, else 0")
REQUESTS = Counter("framesieve_requests_total", "Requests by how they ended", ["method", "code"])
REFUSALS = Counter("framesieve_refusals_total", "Requests that ended with an error of ours", ["method", "reason"])
REQUESTS_RUNNING = Gauge("framesieve_requests_running", "Requests now being served", ["method"])
REQUEST_SECONDS = Histogram(
    "framesieve_request_seconds", "Requests from arrival to end", ["method"], buckets=SECONDS_BUCKETS
)
MESSAGE_BYTES = Counter(
    "framesieve_message_bytes_total", "Messages between this service and those who call it", ["method", "direction"]
)
STAGE_BUSY_SECONDS = Histogram(
    "framesieve_stage_busy_seconds",
    "Time spent working in a stage; stages of one request may overlap",
    ["stage"],
    buckets=SECONDS_BUCKETS,
)

_ENDS_OF_CALLERS = ("OK", "CANCELLED", "DEADLINE_EXCEEDED")


def begin(service: str, method: str, checkpoint: Checkpoint, dtype: str = "", device: str = "") -> None:
    """Says what this process serves, and makes what it counts by method start from 0."""
    BUILD_INFO.labels(service, version("framesieve")).set(1)
    fingerprint = checkpoint.fingerprint.hex()[:12]
    MODEL_INFO.labels(checkpoint.folder.resolve().name, checkpoint.model_type, fingerprint, dtype, device).set(1)
    for error in _errors(FramesieveError):
        REQUESTS.labels(method, error.status)
        REFUSALS.labels(method, error.reason)
    for code in _ENDS_OF_CALLERS:
        REQUESTS.labels(method, code)
    for direction in ("received", "sent"):
        MESSAGE_BYTES.labels(method, direction)
    REQUESTS_RUNNING.labels(method)
    REQUEST_SECONDS.labels(method)


@contextmanager
def busy(stage: str) -> Iterator[None]:
    """Observes the time spent inside as busy time of `stage`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        STAGE_BUSY_SECONDS.labels(stage).observe(time.perf_counter() - start)


def age_seconds(since_ns: int | None) -> float:
    """How long something has waited that began at a moment of the monotonic clock; 0 where nothing waits."""
    return 0.0 if since_ns is None else (time.monotonic_ns() - since_ns) * 1e-9


def _errors(error: type[FramesieveError]) -> Iterator[type[FramesieveError]]:
    yield error
    for leaf in error.__subclasses__():
        yield from _errors(leaf)
