"""Media that the encoder sent, kept as long as the KV cache holds rows of it, so that it need not be sent again.

    key ─▶ EncodedMedia: an id, which tokens were kept, the last rows
    of content, grid, method, rate, seed, checkpoint, and an adapter that changes the tower

The prefix cache identifies a media row by the id of its encoding and its token of the grid, not by the key: the same
media can be encoded again with another choice of tokens, or with embeddings that were rounded in another batch. An item
that arrives in parts has its id from the first of them on, and is found by its key after the last. The cache here holds
weak references: an encoding lives as long as a cached block or a request refers to it.
"""

from __future__ import annotations

import struct
from itertools import count
from weakref import WeakValueDictionary

from gridsieve.common.contract.plan import MediaPlan, tagged_digest
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.services.generation.request.encoded_media import EncodedMedia, MediaItem

_DOMAIN = b"gridsieve answers v1"


def encoded_media_key(
    item: MediaPlan, pruning: ItemPruning, num_kept: int, fingerprint: bytes, adapter: bytes = b""
) -> bytes:
    """32 bytes that differ wherever media, sampling, grid, pruning, checkpoint or adapter differ.

    adapter: digest of the adapter that the tower computes with; empty: none. All prunings that keep every token have
    the same key.
    """
    how = b""
    if num_kept < item.grid.tokens or pruning.threshold is not None:
        threshold = -1.0 if pruning.threshold is None else pruning.threshold
        how = struct.pack("<dqd", pruning.rate, pruning.seed or 0, threshold) + pruning.method.encode()
    grid = struct.pack("<4q", item.grid.t, item.grid.h, item.grid.w, num_kept)
    return tagged_digest(_DOMAIN, (item.content_hash, item.modality.value.encode(), grid, how, fingerprint, adapter))


class EncodedMediaCache:
    """Encoded media by key. Not thread-safe."""

    def __init__(self, max_last_rows: int) -> None:
        """max_last_rows: how many of an item's last embeddings are kept."""
        self._max_last_rows = max_last_rows
        self._by_key: WeakValueDictionary[bytes, EncodedMedia] = WeakValueDictionary()
        self._ids = count(1)

    def lookup(self, key: bytes) -> EncodedMedia | None:
        """The encoding of a complete item."""
        encoded = self._by_key.get(key)
        return encoded if encoded and encoded.last_rows is not None else None

    def store(self, key: bytes, item: MediaItem) -> EncodedMedia:
        """The encoding of an item, or of its first parts: the cached one if it has the same name, else a new id."""
        encoded = self._by_key.get(key)
        if encoded is None or encoded.digest != item.digest:
            encoded = self._by_key[key] = EncodedMedia(next(self._ids), item.digest)
        if item.complete and encoded.last_rows is None:
            encoded.finish(item, self._max_last_rows)
        return encoded
