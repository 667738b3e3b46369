"""Has the gauges read the batcher, the cache and the rooms whenever Prometheus asks."""

from __future__ import annotations

from common.byte_semaphore import ByteSemaphore
from common.telemetry.metrics import age_seconds
from services.encoder.items.batcher import Batcher
from services.encoder.items.cache import EmbedsCache
from services.encoder.metrics import (
    CACHE_BYTES,
    CACHE_BYTES_USED,
    CACHE_WAITERS,
    QUEUE_OLDEST_SECONDS,
    QUEUE_SLICES,
    ROOM_BYTES,
    ROOM_BYTES_USED,
    ROOM_OLDEST_SECONDS,
    ROOM_WAITING,
)


def watch(batcher: Batcher, cache: EmbedsCache, outputs: ByteSemaphore) -> None:
    """Has the gauges ask these whenever they are read."""
    QUEUE_SLICES.set_function(lambda: batcher.queued)
    QUEUE_OLDEST_SECONDS.set_function(lambda: age_seconds(batcher.oldest_ns))
    CACHE_BYTES.set(cache.size_bytes)
    CACHE_BYTES_USED.set_function(lambda: cache.held_bytes)
    CACHE_WAITERS.set_function(lambda: cache.waiters)
    _watch_room("encoding", cache.room)
    _watch_room("output", outputs)


def _watch_room(name: str, room: ByteSemaphore) -> None:
    """Has the gauges of a room ask it whenever they are read."""
    ROOM_BYTES.labels(name).set(room.size_bytes)
    ROOM_BYTES_USED.labels(name).set_function(lambda: room.held_bytes)
    ROOM_WAITING.labels(name).set_function(lambda: room.waiting)
    ROOM_OLDEST_SECONDS.labels(name).set_function(lambda: age_seconds(room.oldest_ns))
