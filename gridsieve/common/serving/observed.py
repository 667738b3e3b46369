"""What is recorded of each request, whatever protocol it came by: its id, metrics, a log line and a span."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from gridsieve.common.channels import REQUEST_ID_KEY
from gridsieve.common.contract.errors import GridsieveError, PeerContract
from gridsieve.common.serving.status import status_message
from gridsieve.common.telemetry.callers import count_caller
from gridsieve.common.telemetry.logs import RequestStats, begin_request_stats
from gridsieve.common.telemetry.metrics import REFUSALS, REQUEST_SECONDS, REQUESTS, REQUESTS_RUNNING
from gridsieve.common.telemetry.tracing import Attributes, RequestSpan

MAX_REQUEST_ID_CHARACTERS = 128

log = structlog.get_logger()


@dataclass(slots=True)
class Outcome:
    """How a request ended. code: the name of a gRPC status. refusal: what the caller was told."""

    code: str = "OK"
    refusal: GridsieveError | None = None

    def refuse(self, error: Exception, method: str) -> GridsieveError:
        """Ends the request with an error. Returns what the caller is told: what it must not read is only logged."""
        self.code = getattr(error, "status", "INTERNAL")
        if isinstance(error, PeerContract):
            log.error("peer broke the contract", error=status_message(error))
            self.refusal = PeerContract(f"a peer of {method} broke the contract, request id {bound_request_id()}")
        elif isinstance(error, GridsieveError):
            self.refusal = error
        else:
            log.error("bug", exc_info=error)
            self.refusal = GridsieveError(f"an internal error in {method}, request id {bound_request_id()}")
        return self.refusal


@contextmanager
def observed(
    method: str, span_name: str, attributes: Attributes, metadata: Mapping[str, str | bytes], part: bool = False
) -> Iterator[Outcome]:
    """Records the request that runs inside. Its body sets the outcome.

    method: the label of metrics. attributes: of the span. metadata: of the call, or headers, in lower case.
    part: whether it is one of many requests of a session: its end is logged at debug, unless it is refused.
    """
    structlog.contextvars.bind_contextvars(request_id=_request_id(metadata), method=method)
    stats, span = begin_request_stats(), RequestSpan(span_name, attributes, metadata)
    start, outcome = time.perf_counter(), Outcome()
    REQUESTS_RUNNING.labels(method).inc()
    log.debug("request began")
    try:
        yield outcome
    finally:
        code, refusal = outcome.code, outcome.refusal
        REQUESTS_RUNNING.labels(method).dec()
        REQUESTS.labels(method, code).inc()
        if refusal is not None:
            REFUSALS.labels(method, refusal.reason).inc()
        seconds = time.perf_counter() - start
        REQUEST_SECONDS.labels(method).observe(seconds)
        count_caller(stats, seconds)
        _log_end(code, refusal, seconds, stats, part)
        span.end(code, None if code == "OK" else refusal.reason if refusal else code, stats)


def is_request_id(given: str) -> bool:
    """Whether text of a caller is a valid request id: 1 to 128 printable ASCII characters."""
    return given.isascii() and given.isprintable() and 0 < len(given) <= MAX_REQUEST_ID_CHARACTERS


def bound_request_id() -> str:
    """The id of the running request: from the call's metadata, or from its message."""
    return str(structlog.contextvars.get_contextvars()["request_id"])


def _request_id(metadata: Mapping[str, str | bytes]) -> str:
    """The caller's request id if it is valid, else a new one."""
    given = metadata.get(REQUEST_ID_KEY, "")
    return given if isinstance(given, str) and is_request_id(given) else uuid.uuid4().hex


def _log_end(code: str, refusal: GridsieveError | None, seconds: float, stats: RequestStats, part: bool) -> None:
    fields = {"code": code, "seconds": round(seconds, 6), **stats}
    if refusal is None:
        (log.debug if part else log.info)("request ended", **fields)
        return
    notes = getattr(refusal, "__notes__", [])
    upstream = {"upstream": notes} if notes else {}
    log.warning("request ended", reason=refusal.reason, error=status_message(refusal), **upstream, **fields)
