"""What the encoder answered about media, remembered for as long as the cache holds anything of it.

    key (content, grid, method, rate, seed, checkpoint) ─▶ answer: an id, which tokens were kept, the last embeddings

Rows of media are known to the cache by their answer's id, for the same media can come back with another choice of
tokens, or with embeddings that were rounded in another batch. An answer lives while a remembered block or a request
refers to it; only then is it found. It knows neither the cache nor the engine.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from common.digest import tagged_digest
from common.plan import Int32Array, MediaPlan
from common.retention import Pruning

if TYPE_CHECKING:  # prefixes.py imports this module and does not know torch
    from torch import Tensor


_DOMAIN = b"framesieve answers v1"


def answer_key(item: MediaPlan, pruning: Pruning, kept_count: int, fingerprint: bytes) -> bytes:
    """32 bytes that differ wherever media, sampling, grid, pruning or checkpoint do; how nothing is pruned is one."""
    how = b""
    if kept_count < item.grid.tokens:
        how = struct.pack("<dq", pruning.rate, pruning.seed or 0) + pruning.method.encode()
    grid = struct.pack("<4q", item.grid.t, item.grid.h, item.grid.w, kept_count)
    return tagged_digest(_DOMAIN, (item.content_hash, item.modality.value.encode(), grid, how, fingerprint))


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """One item of a request, as it came from the encoder and was checked.

    kept: int32 [K], strictly increasing; None if all tokens were.
    embeds: [1 + embed_levels, K, hidden_size] in the model's dtype, finite, on the host.
    digest: of kept and embeddings as they were sent.
    """

    media_index: int
    kept: Int32Array | None
    embeds: Tensor
    repaired_frames: int
    digest: bytes


class Answer:
    """One answer of the encoder about one media item.

    id: from 1, and never given to another answer.
    digest, kept, repaired_frames: as they came.
    last_rows: [1 + levels, min(K, block_tokens − 1), D], its last embeddings: where a block ends is chance, and without
        these a prompt that goes on differently would need the whole item again for the few rows behind it. They stay on
        the host: a device's memory is shared out beforehand, and answers are many.
    """

    __slots__ = ("__weakref__", "digest", "id", "kept", "last_rows", "repaired_frames")

    def __init__(self, id: int, item: MediaItem, last_rows: Tensor) -> None:  # noqa: A002  (as it is called everywhere)
        self.id = id
        self.digest = item.digest
        self.kept = item.kept
        self.repaired_frames = item.repaired_frames
        self.last_rows = last_rows


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
