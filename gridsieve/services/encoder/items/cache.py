"""Embeddings by content: made once for all concurrent requests, and cached for later ones.

    join ─▶ absent      ─▶ reserve bytes, begin a delivery ─▶ slices ─▶ complete ─▶ gathered ─▶ cached
            being made  ─▶ wait; begin a delivery if this one ends early ──▲                      │
            cached      ─▶ gathered at once ◀─────────────────────────────────────────────────────┘

Slices are found by content, too: a new entry copies those that a cached one has, so that parts of one film share what
they show. Entries share no memory.

An entry belongs to the requested items that wait for it; when the last one leaves an unfinished entry, its delivery is
abandoned. Cached entries that nothing reads are evicted, least recently used first. Nothing waits for an eviction, so
cached entries cannot block a request. It knows no gRPC and no prompts.
"""

from __future__ import annotations

import secrets
import struct
from collections import OrderedDict

import torch
from torch import Tensor

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract.plan import DIGEST_BYTES, MediaPlan, tagged_digest
from gridsieve.common.contract.retention import Pruning
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.items.cache_entry import CacheEntry
from gridsieve.services.encoder.items.decoded_slices import SliceKey, num_encoded
from gridsieve.services.encoder.metrics import EVICTIONS, LOOKUPS
from gridsieve.services.encoder.tower.tower import Tower

_KEY_DOMAIN = b"gridsieve embeddings v2"


class EmbedsCache:
    """encoding_bytes: limits entries that are being made. size_bytes: limits cached entries, in addition; 0: none."""

    def __init__(self, tower: Tower, batcher: Batcher, encoding_bytes: ByteSemaphore, size_bytes: int) -> None:
        self.tower = tower
        self.encoding_bytes = encoding_bytes
        self.size_bytes = size_bytes
        self.held_bytes = 0  # of cached entries
        self.waiters = 0  # requested items that wait for an entry or read it
        self._batcher = batcher
        self._entries: dict[bytes, CacheEntry] = {}
        self._idle: OrderedDict[CacheEntry, None] = OrderedDict()  # cached and not read, least recently used first
        self._idle_bytes = 0
        self._slices: dict[SliceKey, tuple[CacheEntry, int]] = {}  # of cached entries, the latest with such a slice

    def join(self, plan: MediaPlan, chosen: Pruning | None = None, adapter: bytes = b"") -> CacheEntry:
        """The item's entry, with the caller as a waiter until `leave`.

        chosen: how its tokens are chosen before the tower; None: all are encoded. adapter: digest of the one that it is
        encoded with; empty: none.
        """
        key = cache_key(plan, chosen, self.tower.dtype, self.tower.embed_levels, adapter)
        entry = self._entries.get(key)
        if entry is None or entry.failure is not None:
            entry = self._entries[key] = self._new_entry(key, plan, chosen, adapter)
            LOOKUPS.labels("miss").inc()
        elif entry.cached:
            LOOKUPS.labels("hit").inc()
            add_request_stats(cached_media=1)
        else:
            LOOKUPS.labels("shared").inc()
        return self._joined(entry)

    def join_unshared(self, plan: MediaPlan) -> CacheEntry:
        """An entry for embeddings that a prompt brought: remaking it is one copy, so it never evicts others."""
        return self._joined(self._new_entry(None, plan))

    def leave(self, entry: CacheEntry) -> None:
        """Removes a waiter. After the last one a complete entry is cached if it fits, and any other is dropped."""
        entry.waiters -= 1
        self.waiters -= 1
        if entry.waiters:
            return
        if entry.cached or self._cache(entry):
            self._idle[entry] = None
            self._idle_bytes += entry.size_bytes
            return
        self._drop(entry)
        if entry.delivery is not None:
            entry.delivery.abandoned()

    def _new_entry(
        self, key: bytes | None, plan: MediaPlan, chosen: Pruning | None = None, adapter: bytes = b""
    ) -> CacheEntry:
        # Embeddings that a prompt brings are named by their content; those of two forwards differ in rounding.
        encoding = plan.content_hash if plan.brings_embeds else secrets.token_bytes(DIGEST_BYTES)
        reserved = self.encoding_bytes
        return CacheEntry(key, encoding, plan, self.tower, self._batcher, reserved, chosen, self._find, adapter)

    def _find(self, key: SliceKey) -> Tensor | None:
        if key not in self._slices:
            return None
        entry, index = self._slices[key]
        return entry.slice_embeds(index)

    def _joined(self, entry: CacheEntry) -> CacheEntry:
        if entry in self._idle:
            del self._idle[entry]
            self._idle_bytes -= entry.size_bytes
        entry.waiters += 1
        self.waiters += 1
        return entry

    def _cache(self, entry: CacheEntry) -> bool:
        """Caches a complete entry, evicting idle ones; False, with nothing evicted, if it cannot fit."""
        read_bytes = self.held_bytes - self._idle_bytes
        if not entry.cacheable or read_bytes + entry.size_bytes > self.size_bytes:
            return False
        while self.held_bytes + entry.size_bytes > self.size_bytes:
            oldest, _ = self._idle.popitem(last=False)
            self._idle_bytes -= oldest.size_bytes
            self.held_bytes -= oldest.size_bytes
            self._drop(oldest)
            EVICTIONS.inc()
        entry.cached = True
        self._slices |= {key: (entry, index) for index, key in enumerate(entry.slices.keys) if key}
        self.held_bytes += entry.size_bytes
        entry.release_reservation()
        return True

    def _drop(self, entry: CacheEntry) -> None:
        if entry.key is not None and self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        for key in entry.slices.keys:
            if key in self._slices and self._slices[key][0] is entry:
                del self._slices[key]
        entry.close()


def cache_key(
    item: MediaPlan, chosen: Pruning | None, dtype: torch.dtype, embed_levels: int, adapter: bytes = b""
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
