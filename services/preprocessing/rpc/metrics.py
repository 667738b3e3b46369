"""What preprocessing tells Prometheus beside what every service does."""

from __future__ import annotations

import os
from collections.abc import Iterable

from prometheus_client import Counter, Gauge

from common.telemetry.metrics import STAGE_BUSY_SECONDS, age_seconds
from services.preprocessing.rpc.threads import Threads
from services.preprocessing.sources.source import Source
from services.preprocessing.video.slices import Slice
from services.preprocessing.workers.pool import Pool
from services.preprocessing.workers.process import Fault

_PREFIX = "framesieve_preprocessing_"

FRAMES = Counter(f"{_PREFIX}frames_total", "Frames sent, by what became of them", ["outcome"])
FETCHED_BYTES = Counter(f"{_PREFIX}fetched_bytes_total", "Bytes of media that came by URL")
WORKER_RESTARTS = Counter(
    f"{_PREFIX}worker_restarts_total", "Worker processes that were replaced, by what was wrong with them", ["reason"]
)
WORKERS = Gauge(f"{_PREFIX}workers", "Worker processes that there are to be", ["pool"])
WORKERS_BUSY = Gauge(f"{_PREFIX}workers_busy", "Of these, those that have a job", ["pool"])
JOBS = Gauge(f"{_PREFIX}jobs", "Media that worker processes read or decode, or that wait for one", ["pool"])
QUEUE_JOBS = Gauge(f"{_PREFIX}queue_jobs", "Of these, those that wait for a worker", ["pool"])
QUEUE_OLDEST_SECONDS = Gauge(
    f"{_PREFIX}queue_oldest_seconds", "How long the first of these has waited; 0 if none does", ["pool"]
)
PLANNING_JOBS = Gauge(
    f"{_PREFIX}planning_jobs", "Prompts that threads check or plan, or that wait for one", ["threads"]
)
PLANNING_WAITING = Gauge(f"{_PREFIX}planning_waiting", "Of these, those that wait for a thread", ["threads"])
PLANNING_OLDEST_SECONDS = Gauge(
    f"{_PREFIX}planning_oldest_seconds", "How long the first of these has waited; 0 if none does", ["threads"]
)
INFLIGHT_BYTES_USED = Gauge(f"{_PREFIX}inflight_used_bytes", "Bytes of --inflight-bytes that decoded slices hold")
INFLIGHT_BYTES = Gauge(f"{_PREFIX}inflight_bytes", "--inflight-bytes")

for _stage in ("fetch", "plan", "decode", "resize"):
    STAGE_BUSY_SECONDS.labels(_stage)
for _fault in Fault:
    WORKER_RESTARTS.labels(_fault)
for _outcome in ("decoded", "repaired"):
    FRAMES.labels(_outcome)


def count_replaced(fault: Fault) -> None:
    WORKER_RESTARTS.labels(fault).inc()


def count_frames(sent: Slice) -> None:
    FRAMES.labels("decoded").inc(len(sent.pixels) - sent.repaired_frames)
    FRAMES.labels("repaired").inc(sent.repaired_frames)


def count_fetched(sources: Iterable[Source]) -> None:
    FETCHED_BYTES.inc(sum(os.fstat(source.descriptor).st_size for source in sources))


def watch(reading: Pool, decoding: Pool, quick: Threads, slow: Threads) -> None:
    """Has the gauges ask the pools and threads whenever they are read."""
    INFLIGHT_BYTES.set(decoding.inflight.size_bytes)
    INFLIGHT_BYTES_USED.set_function(lambda: decoding.inflight_bytes)
    for name, pool in {"read": reading, "decode": decoding}.items():
        _watch_pool(name, pool)
    for name, threads in {"quick": quick, "slow": slow}.items():
        _watch_threads(name, threads)


def _watch_pool(name: str, pool: Pool) -> None:
    WORKERS.labels(name).set(pool.crew.size)
    WORKERS_BUSY.labels(name).set_function(lambda: pool.crew.busy)
    JOBS.labels(name).set_function(lambda: pool.jobs)
    QUEUE_JOBS.labels(name).set_function(lambda: pool.crew.waiting)
    QUEUE_OLDEST_SECONDS.labels(name).set_function(lambda: age_seconds(pool.crew.oldest_ns))


def _watch_threads(name: str, threads: Threads) -> None:
    PLANNING_JOBS.labels(name).set_function(lambda: threads.jobs)
    PLANNING_WAITING.labels(name).set_function(lambda: threads.waiting)
    PLANNING_OLDEST_SECONDS.labels(name).set_function(lambda: age_seconds(threads.oldest_ns))
