"""Embeddings by content: made once for all concurrent requests, and cached for later ones.

    join ─▶ absent      ─▶ reserve bytes, begin a delivery ─▶ slices ─▶ complete ─▶ gathered ─▶ cached
            being made  ─▶ wait; begin a delivery if this one ends early ──▲                      │
            cached      ─▶ gathered at once ◀─────────────────────────────────────────────────────┘

Slices are found by content, too: a new entry copies those that a cached one has, so that parts of one film share what
they show. Entries share no memory.

A pending entry belongs to the requested items that wait for it; when the last one leaves it unfinished, its delivery
is abandoned. Cached entries that nothing reads are evicted, least recently used first. Nothing waits for an eviction,
so cached entries cannot block a request. It knows no gRPC and no prompts.
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections import Counter, OrderedDict
from time import monotonic_ns

import torch
from torch import Tensor

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract.plan import DIGEST_BYTES, MediaPlan, tagged_digest
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.items.cache_entry import CacheEntry, StageTimes, copied_embeds
from gridsieve.services.encoder.items.decoded_slices import SliceKey, num_encoded
from gridsieve.services.encoder.items.pending_entry import PendingEntry
from gridsieve.services.encoder.metrics import EVICTIONS, LOOKUPS
from gridsieve.services.encoder.tower.tower import Tower

_KEY_DOMAIN = b"gridsieve embeddings v2"


class EmbedsCache:
    """encoding_bytes: limits entries that are being made. size_bytes: limits cached entries, in addition; 0: none."""

    def __init__(self, tower: Tower, batcher: Batcher, encoding_bytes: ByteSemaphore, size_bytes: int) -> None:
        self.tower = tower
        self.batcher = batcher
        self.encoding_bytes = encoding_bytes
        self.size_bytes = size_bytes
        self.held_bytes = 0  # of cached entries
        self.waiters = 0  # requested items that wait for an entry or read it
        self._pending: dict[bytes, PendingEntry] = {}
        self._entries: OrderedDict[bytes, CacheEntry] = OrderedDict()  # cached, least recently used first
        self._readers: Counter[CacheEntry] = Counter()  # of cached entries
        self._slices: dict[SliceKey, CacheEntry] = {}  # the latest cached entry with such a slice

    def join(
        self, plan: MediaPlan, chosen: ItemPruning | None = None, adapter: bytes = b""
    ) -> PendingEntry | CacheEntry:
        """The item's entry, or what becomes it, with the caller as a waiter until `leave`.

        chosen: how its tokens are chosen before the tower; None: all are encoded. adapter: digest of the adapter that
        the tower computes with; empty: none.
        """
        key = cache_key(plan, chosen, self.tower.dtype, self.tower.embed_levels, adapter)
        if entry := self._entries.get(key):
            LOOKUPS.labels("hit").inc()
            add_request_stats(cached_media=1)
            self._readers[entry] += 1
            self.waiters += 1
            return entry
        pending = self._pending.get(key)
        if pending is None or pending.failure is not None:
            LOOKUPS.labels("miss").inc()
            # Embeddings of two forwards differ in rounding.
            encoding, reserved = secrets.token_bytes(DIGEST_BYTES), self.encoding_bytes
            pending = PendingEntry(key, encoding, plan, self.tower, self.batcher, reserved, chosen, self._find, adapter)
            self._pending[key] = pending
        else:
            LOOKUPS.labels("shared").inc()
        pending.waiters += 1
        self.waiters += 1
        return pending

    async def bring(self, plan: MediaPlan, embeds: Tensor) -> CacheEntry:
        """An entry of embeddings that a prompt brought, with the caller as a waiter until `leave`. Remaking it is one
        copy, so it never evicts others.

        embeds: (1 + levels, tokens, D), any float dtype.
        """
        size_bytes, times = self.tower.embeds_bytes(embeds.shape[1]), StageTimes(begun_ns=monotonic_ns())
        await self.encoding_bytes.reserve(size_bytes)
        try:
            with self.batcher.ending_on_device_errors():
                own = await asyncio.to_thread(copied_embeds, embeds, self.tower)
        except BaseException:
            self.encoding_bytes.release(size_bytes)
            raise
        times.encoded_ns = monotonic_ns()
        self.waiters += 1
        return CacheEntry(b"", plan.content_hash, own, None, {}, times, 0, b"", size_bytes)

    def leave(self, joined: PendingEntry | CacheEntry) -> None:
        """Removes a waiter. After the last one a complete entry is cached if it fits, and any other is dropped."""
        self.waiters -= 1
        if isinstance(joined, CacheEntry):
            self._end_reading(joined)
            return
        joined.waiters -= 1
        if joined.waiters:
            return
        if self._pending.get(joined.key) is joined:  # else it failed, and another took its place
            del self._pending[joined.key]
            if joined.entry is not None:
                self._cache(joined.entry)
        joined.close()
        if joined.delivery is not None:
            joined.delivery.abandoned()

    def _end_reading(self, entry: CacheEntry) -> None:
        if not entry.key:
            self.encoding_bytes.release(entry.size_bytes)
            return
        self._readers[entry] -= 1
        if not self._readers[entry]:
            del self._readers[entry]
            self._entries.move_to_end(entry.key)

    def _find(self, key: SliceKey) -> Tensor | None:
        entry = self._slices.get(key)
        return None if entry is None else entry.embeds[:, entry.rows[key]]

    def _cache(self, entry: CacheEntry) -> None:
        """Caches an entry, evicting others that nothing reads, unless it cannot fit."""
        read_bytes = sum(each.size_bytes for each in self._readers)
        if read_bytes + entry.size_bytes > self.size_bytes:
            return
        while self.held_bytes + entry.size_bytes > self.size_bytes:
            self._evict(next(each for each in self._entries.values() if each not in self._readers))
        self._entries[entry.key] = entry
        self._slices |= dict.fromkeys(entry.rows, entry)
        self.held_bytes += entry.size_bytes

    def _evict(self, entry: CacheEntry) -> None:
        del self._entries[entry.key]
        for key in entry.rows:
            if self._slices.get(key) is entry:
                del self._slices[key]
        self.held_bytes -= entry.size_bytes
        EVICTIONS.inc()


def cache_key(
    item: MediaPlan, chosen: ItemPruning | None, dtype: torch.dtype, embed_levels: int, adapter: bytes = b""
) -> bytes:
    """32 bytes that differ wherever modality, grid, dtype, levels, content, adapter or the choice before the tower
    differ.

    The content hash covers file bytes, frame selection, frame size, time base and the checkpoint's fingerprint. The
    item's place in the prompt, its pruning after the tower and the caller do not enter.
    """
    how = b""
    if chosen:
        threshold = -1.0 if chosen.threshold is None else chosen.threshold
        how = struct.pack("<qqd", num_encoded(item, chosen), chosen.first_slice, threshold) + chosen.method.encode()
        how += chosen.reference
    return tagged_digest(
        _KEY_DOMAIN,
        (
            item.content_hash,
            item.modality.value.encode(),
            struct.pack("<3q", item.grid.t, item.grid.h, item.grid.w),
            str(dtype).encode(),
            struct.pack("<q", embed_levels),
            how,
            adapter,
        ),
    )
