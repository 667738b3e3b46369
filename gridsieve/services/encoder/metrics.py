"""Prometheus metrics of the encoder, in addition to those that every service has."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from gridsieve.common.contract.plan import MediaPlan, Modality
from gridsieve.common.contract.retention import METHODS, ItemPruning, method_of
from gridsieve.common.telemetry.metrics import STAGE_BUSY_SECONDS

_PREFIX = "gridsieve_encoder_"

QUEUE_SLICES = Gauge(f"{_PREFIX}queue_slices", "Temporal slices queued for the tower")
QUEUE_OLDEST_SECONDS = Gauge(f"{_PREFIX}queue_oldest_seconds", "Age of the oldest queued slice; 0 if none is queued")
# A forward holds at least one slice; a slice has from a few to a few thousand tokens, a forward up to --batch-tokens.
BATCH_SLICES = Histogram(f"{_PREFIX}batch_slices", "Slices in one forward", buckets=[2**power for power in range(10)])
BATCH_TOKENS = Histogram(
    f"{_PREFIX}batch_tokens", "Merged tokens in one forward", buckets=[2**power for power in range(4, 17)]
)
GRAPH_REPLAYS = Counter(f"{_PREFIX}graph_replays_total", "Forwards that replayed a CUDA graph")
GRAPH_TOKENS = Counter(f"{_PREFIX}graph_tokens_total", "Merged tokens of slices in replayed graphs")
GRAPH_PADDING_TOKENS = Counter(f"{_PREFIX}graph_padding_tokens_total", "Merged tokens of padding in replayed graphs")
EAGER_FORWARDS = Counter(f"{_PREFIX}eager_forwards_total", "Forwards without a CUDA graph, by reason", ["reason"])
ITEMS = Counter(f"{_PREFIX}items_total", "Media items answered", ["modality"])
TOKENS = Counter(f"{_PREFIX}tokens_total", "Tokens of answered items, before and after pruning", ["method", "pruning"])
LOOKUPS = Counter(
    f"{_PREFIX}cache_lookups_total",
    "Requested media items by outcome: cached (hit), being made for another request (shared), or neither (miss)",
    ["outcome"],
)
REUSED_SLICES = Counter(
    f"{_PREFIX}reused_slices_total",
    "Slices copied instead of encoded, from an equal one earlier in their item (repeated) or in another (cached)",
    ["source"],
)
EVICTIONS = Counter(f"{_PREFIX}cache_evictions_total", "Media items evicted from the cache")
CACHE_BYTES_USED = Gauge(f"{_PREFIX}cache_used_bytes", "Bytes of cached embeddings and scores")
CACHE_BYTES = Gauge(f"{_PREFIX}cache_bytes", "--cache-bytes")
CACHE_WAITERS = Gauge(f"{_PREFIX}cache_waiters", "Requested items that wait for a cache entry or read it")
BUFFER_BYTES_USED = Gauge(
    f"{_PREFIX}buffer_used_bytes", "Bytes reserved for items being encoded, and for embeddings to be sent", ["buffer"]
)
BUFFER_BYTES = Gauge(f"{_PREFIX}buffer_bytes", "Limit of these bytes: --output-buffer-bytes", ["buffer"])
BUFFER_WAITING = Gauge(f"{_PREFIX}buffer_waiting", "Items that wait for such bytes", ["buffer"])
BUFFER_OLDEST_SECONDS = Gauge(
    f"{_PREFIX}buffer_oldest_seconds", "How long the first of these items has waited; 0 if none waits", ["buffer"]
)

# So that every label value is exported from the start.
for _stage in ("encode", "prune"):
    STAGE_BUSY_SECONDS.labels(_stage)
for _modality in Modality:
    ITEMS.labels(_modality.value)
for _method in METHODS:
    TOKENS.labels(_method, "before")
    TOKENS.labels(_method, "after")
for _outcome in ("hit", "shared", "miss"):
    LOOKUPS.labels(_outcome)
for _source in ("repeated", "cached"):
    REUSED_SLICES.labels(_source)


def count_item(item: MediaPlan, pruning: ItemPruning, kept: int) -> None:
    """Counts an answered item. kept: how many of its tokens were sent."""
    ITEMS.labels(item.modality.value).inc()
    method = method_of(pruning, item.modality)
    TOKENS.labels(method, "before").inc(item.grid.tokens)
    TOKENS.labels(method, "after").inc(kept)
