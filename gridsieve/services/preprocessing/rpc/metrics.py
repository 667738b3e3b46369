"""Preprocessing's own Prometheus metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import Counter, Gauge

from gridsieve.common.telemetry.metrics import STAGE_BUSY_SECONDS, age_seconds
from gridsieve.services.preprocessing.rpc.planning_threads import PlanningThreads
from gridsieve.services.preprocessing.video.slices import Slice
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.limits import Mechanism
from gridsieve.services.preprocessing.workers.process import Fault

_PREFIX = "gridsieve_preprocessing_"

FRAMES = Counter(f"{_PREFIX}frames_total", "Frames of selected media, decoded or repaired", ["outcome"])
FETCHED_BYTES = Counter(f"{_PREFIX}fetched_bytes_total", "Bytes of media fetched from URLs")
CACHE_REQUESTS = Counter(
    f"{_PREFIX}cache_requests_total",
    "Digests of files, indexes of media and fetched bodies that were asked for, and kept or not",
    ["cache", "outcome"],
)
WORKER_RESTARTS = Counter(f"{_PREFIX}worker_restarts_total", "Worker processes replaced, by fault", ["reason"])
WORKERS = Gauge(f"{_PREFIX}workers", "Worker processes of the pool", ["pool"])
WORKERS_BUSY = Gauge(f"{_PREFIX}workers_busy", "Worker processes with a job", ["pool"])
JOBS = Gauge(f"{_PREFIX}jobs", "Media items that are read or decoded, or wait for a worker", ["pool"])
QUEUE_JOBS = Gauge(f"{_PREFIX}queue_jobs", "Media items that wait for a worker", ["pool"])
QUEUE_OLDEST_SECONDS = Gauge(
    f"{_PREFIX}queue_oldest_seconds", "Age of the longest wait for a worker; 0 if nothing waits", ["pool"]
)
PLANNING_JOBS = Gauge(
    f"{_PREFIX}planning_jobs", "Prompts that are checked or planned, or wait for a thread", ["threads"]
)
PLANNING_WAITING = Gauge(f"{_PREFIX}planning_waiting", "Prompts that wait for a thread", ["threads"])
PLANNING_OLDEST_SECONDS = Gauge(
    f"{_PREFIX}planning_oldest_seconds", "Age of the longest wait for a thread; 0 if nothing waits", ["threads"]
)
INFLIGHT_BYTES_USED = Gauge(f"{_PREFIX}inflight_used_bytes", "Bytes of --inflight-bytes that decoded slices hold")
WORKERS_CONFINED = Gauge(
    f"{_PREFIX}workers_confined", "1 if the mechanism confines every worker, else 0", ["mechanism"]
)
INFLIGHT_BYTES = Gauge(f"{_PREFIX}inflight_bytes", "The setting --inflight-bytes")

for _stage in ("fetch", "plan", "decode", "resize"):
    STAGE_BUSY_SECONDS.labels(_stage)
for _fault in Fault:
    WORKER_RESTARTS.labels(_fault)
for _cache in ("digest", "index", "fetch"):
    for _outcome in ("hit", "miss"):
        CACHE_REQUESTS.labels(_cache, _outcome)
for _outcome in ("decoded", "repaired"):
    FRAMES.labels(_outcome)


def count_replaced(fault: Fault) -> None:
    WORKER_RESTARTS.labels(fault).inc()


def count_frames(sent: Slice) -> None:
    FRAMES.labels("decoded").inc(len(sent.pixels) - sent.repaired_frames)
    FRAMES.labels("repaired").inc(sent.repaired_frames)


def count_kept(cache: str) -> Callable[[bool], None]:
    """Counts the requests of a cache that had what was asked for."""
    hit, miss = (CACHE_REQUESTS.labels(cache, outcome) for outcome in ("hit", "miss"))
    return lambda kept: (hit if kept else miss).inc()


def watch(reading: JobQueue, decoding: JobQueue, quick: PlanningThreads, slow: PlanningThreads) -> None:
    """Connects the gauges to the queues and threads, which are read at each scrape."""
    INFLIGHT_BYTES.set(decoding.inflight.size_bytes)
    INFLIGHT_BYTES_USED.set_function(lambda: decoding.inflight.held_bytes)
    for mechanism in Mechanism:
        WORKERS_CONFINED.labels(mechanism).set_function(partial(_confines, decoding, mechanism))
    _watch_pool("read", reading)
    _watch_pool("decode", decoding)
    _watch_threads("quick", quick)
    _watch_threads("slow", slow)


def _confines(pool: JobQueue, mechanism: Mechanism) -> bool:
    return mechanism in pool.workers.confined_by


def _watch_pool(name: str, pool: JobQueue) -> None:
    WORKERS.labels(name).set(pool.workers.size)
    WORKERS_BUSY.labels(name).set_function(lambda: pool.workers.busy)
    JOBS.labels(name).set_function(lambda: pool.jobs)
    QUEUE_JOBS.labels(name).set_function(lambda: pool.workers.waiting)
    QUEUE_OLDEST_SECONDS.labels(name).set_function(lambda: age_seconds(pool.workers.oldest_ns))


def _watch_threads(name: str, threads: PlanningThreads) -> None:
    PLANNING_JOBS.labels(name).set_function(lambda: threads.jobs)
    PLANNING_WAITING.labels(name).set_function(lambda: threads.waiting)
    PLANNING_OLDEST_SECONDS.labels(name).set_function(lambda: age_seconds(threads.oldest_ns))
