"""Gauges that read the batcher, the cache and the byte semaphores whenever Prometheus scrapes.

Beside `metrics`, which lies below the modules that are read here.
"""

from __future__ import annotations

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.telemetry.metrics import age_seconds
from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.items.cache import EmbedsCache
from gridsieve.services.encoder.metrics import (
    BUFFER_BYTES,
    BUFFER_BYTES_USED,
    BUFFER_OLDEST_SECONDS,
    BUFFER_WAITING,
    CACHE_BYTES,
    CACHE_BYTES_USED,
    CACHE_WAITERS,
    QUEUE_OLDEST_SECONDS,
    QUEUE_SLICES,
)


def watch(batcher: Batcher, cache: EmbedsCache, output_bytes: ByteSemaphore) -> None:
    """Makes the gauges read these objects from now on."""
    QUEUE_SLICES.set_function(lambda: batcher.queued)
    QUEUE_OLDEST_SECONDS.set_function(lambda: age_seconds(batcher.oldest_ns))
    CACHE_BYTES.set(cache.size_bytes)
    CACHE_BYTES_USED.set_function(lambda: cache.held_bytes)
    CACHE_WAITERS.set_function(lambda: cache.waiters)
    _watch_semaphore("encoding", cache.encoding_bytes)
    _watch_semaphore("output", output_bytes)


def _watch_semaphore(name: str, semaphore: ByteSemaphore) -> None:
    BUFFER_BYTES.labels(name).set(semaphore.size_bytes)
    BUFFER_BYTES_USED.labels(name).set_function(lambda: semaphore.held_bytes)
    BUFFER_WAITING.labels(name).set_function(lambda: semaphore.waiting)
    BUFFER_OLDEST_SECONDS.labels(name).set_function(lambda: age_seconds(semaphore.oldest_ns))
