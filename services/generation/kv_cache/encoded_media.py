"""What the encoder answered about media, remembered for as long as the cache holds anything of it.

    key (content, grid, method, rate, seed, checkpoint) ─▶ answer: an id, which tokens were kept, the last embeddings

Rows of media are known to the cache by their answer's id, for the same media can come back with another choice of
tokens, or with embeddings that were rounded in another batch. An answer lives while a remembered block or a request
refers to it; only then is it found. It knows neither the cache nor the engine.
"""

from __future__ import annotations

import struct
from itertools import count
from weakref import WeakValueDictionary

from common.contract.plan import tagged_digest
from common.contract.plan import MediaPlan
from common.contract.retention import Pruning
from services.generation.request.encoded_media import Answer, MediaItem

_DOMAIN = b"framesieve answers v1"


def answer_key(item: MediaPlan, pruning: Pruning, kept_count: int, fingerprint: bytes) -> bytes:
    """32 bytes that differ wherever media, sampling, grid, pruning or checkpoint do; how nothing is pruned is one."""
    how = b""
    if kept_count < item.grid.tokens:
        how = struct.pack("<dq", pruning.rate, pruning.seed or 0) + pruning.method.encode()
    grid = struct.pack("<4q", item.grid.t, item.grid.h, item.grid.w, kept_count)
    return tagged_digest(_DOMAIN, (item.content_hash, item.modality.value.encode(), grid, how, fingerprint))


class Answers:
    """Answers by key. Not for several threads at a time."""

    def __init__(self, rows: int) -> None:
        """rows: how many of an answer's last embeddings are remembered."""
        self._rows = rows
        self._by_key: WeakValueDictionary[bytes, Answer] = WeakValueDictionary()
        self._ids = count(1)

    def find(self, key: bytes) -> Answer | None:
        return self._by_key.get(key)

    def note(self, key: bytes, item: MediaItem) -> Answer:
        """The answer for what has arrived: the one that is known if it is the same to the last bit, else a new one."""
        known = self._by_key.get(key)
        if known and known.digest == item.digest:
            return known
        # A copy: a view would keep the whole item in memory.
        last_rows = item.embeds[:, max(0, item.embeds.shape[1] - self._rows) :].clone()
        answer = self._by_key[key] = Answer(next(self._ids), item, last_rows)
        return answer
