"""What preprocessing counts beside what all services count."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

from services.preprocessing.slices import Slice
from services.preprocessing.workers.pool import Pool
from services.preprocessing.workers.process import Fault

_PREFIX = "framesieve_preprocessing_"

FRAMES = Counter(f"{_PREFIX}frames_total", "Frames sent, by what became of them", ["outcome"])
WORKERS_REPLACED = Counter(
    f"{_PREFIX}workers_replaced_total", "Worker processes that were replaced, by what was wrong with them", ["reason"]
)
JOBS = Gauge(f"{_PREFIX}jobs", "Media that worker processes read or decode, or that wait for one", ["stage"])
INFLIGHT_BYTES = Gauge(f"{_PREFIX}inflight_used_bytes", "Bytes of --inflight-bytes that decoded slices hold")

for each in Fault:
    WORKERS_REPLACED.labels(each)


def count_replaced(fault: Fault) -> None:
    WORKERS_REPLACED.labels(fault).inc()


def count_frames(sent: Slice) -> None:
    FRAMES.labels("decoded").inc(len(sent.pixels) - sent.repaired_frames)
    FRAMES.labels("repaired").inc(sent.repaired_frames)


def watch(reading: Pool, decoding: Pool) -> None:
    """Has the gauges ask the pools whenever they are read."""
    JOBS.labels("read").set_function(lambda: reading.jobs)
    JOBS.labels("decode").set_function(lambda: decoding.jobs)
    INFLIGHT_BYTES.set_function(lambda: decoding.inflight_bytes)
