"""Prometheus metrics of every service. Metrics of one service are in its own `metrics.py`; docs/metrics.md lists all.

Names follow Prometheus' conventions: gridsieve_…_seconds, _bytes, _total. Values of labels come from small fixed sets
and never from callers, but for the names of the sources of live sessions. All other series exist from the start with
value 0, because Prometheus does not see the increase to the first value of a new series.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version

from prometheus_client import Counter, Gauge, Histogram

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import GridsieveError

# From one message to a queued long video. Neighbouring buckets differ by a factor of 2.5 at most.
SECONDS_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250)
# For events per token, from a tiny model to a stalled one, by factors of 2: users notice a token rate that halves.
FINE_SECONDS_BUCKETS = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1, 2, 4)

BUILD_INFO = Gauge("gridsieve_build_info", "Always 1; labels name the service and its release", ["service", "version"])
MODEL_INFO = Gauge(
    "gridsieve_model_info",
    "Always 1; labels name the checkpoint, whose fingerprint must be the same in all services",
    ["model", "family", "fingerprint", "dtype", "device"],
)
SERVING = Gauge("gridsieve_serving", "1 while health reports SERVING, else 0")
REQUESTS = Counter("gridsieve_requests_total", "Requests by their final gRPC status", ["method", "code"])
REFUSALS = Counter("gridsieve_refusals_total", "Requests that ended with an error, by its reason", ["method", "reason"])
REQUESTS_RUNNING = Gauge("gridsieve_requests_running", "Requests that are running", ["method"])
REQUEST_SECONDS = Histogram("gridsieve_request_seconds", "Duration of requests", ["method"], buckets=SECONDS_BUCKETS)
MESSAGE_BYTES = Counter(
    "gridsieve_message_bytes_total", "Size of messages received from and sent to callers", ["method", "direction"]
)
STAGE_BUSY_SECONDS = Histogram(
    "gridsieve_stage_busy_seconds",
    "Time spent working in a stage; stages of one request may overlap",
    ["stage"],
    buckets=SECONDS_BUCKETS,
)

_CODES_WITHOUT_ERROR = ("OK", "CANCELLED", "DEADLINE_EXCEEDED")


def begin(
    service: str, method: str, checkpoint: Checkpoint, names: Sequence[str], dtype: str = "", device: str = ""
) -> None:
    """Sets the info metrics of this process and creates the series of its method.

    names: --served-model-name.
    """
    BUILD_INFO.labels(service, version("gridsieve")).set(1)
    name, fingerprint = served_names(checkpoint, names)[0], checkpoint.fingerprint.hex()[:12]
    MODEL_INFO.labels(name, checkpoint.model_type, fingerprint, dtype, device).set(1)
    begin_method(method)


def served_names(checkpoint: Checkpoint, given: Sequence[str]) -> tuple[str, ...]:
    """The names of a model: --served-model-name, else the checkpoint's own. The first is the label of metrics."""
    return tuple(given) or (checkpoint.name,)


def begin_method(method: str) -> None:
    """Creates the series of a method."""
    for error in _errors(GridsieveError):
        REQUESTS.labels(method, error.status)
        REFUSALS.labels(method, error.reason)
    for code in _CODES_WITHOUT_ERROR:
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
    """Seconds since `since_ns` of the monotonic clock; 0 for None."""
    return 0.0 if since_ns is None else (time.monotonic_ns() - since_ns) * 1e-9


def _errors(error: type[GridsieveError]) -> Iterator[type[GridsieveError]]:
    yield error
    for leaf in error.__subclasses__():
        yield from _errors(leaf)
