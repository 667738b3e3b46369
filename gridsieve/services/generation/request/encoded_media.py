"""One media item of a request as the encoder sent it, whole or in parts, and what stays of it after the request."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gridsieve.common.contract.plan import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """A received item, or what has arrived of it so far, checked against the plan.

    kept: int32 [K], strictly increasing; None if all tokens were kept.
    embeds: [1 + embed_levels, K, hidden_size] in the model's dtype, finite, on the host. While parts are missing it has
        room for them, too.
    digest: names the encoding: embeddings of one token in items of equal digests are equal to the last bit.
    tokens: how many of the grid's tokens, from the first on, `kept` decides about; None: all, and nothing is missing.
    reference: of a complete item, what was last shown of each place, if it was asked for.
    """

    media_index: int
    kept: Int32Array | None
    embeds: Tensor
    repaired_frames: int
    digest: bytes
    tokens: int | None = None
    reference: bytes = b""

    @property
    def complete(self) -> bool:
        return self.tokens is None


class EncodedMedia:
    """The identity of an item's encoding, and its last rows.

    id: from 1, unique among all encodings; it names their rows from the first part of the item on.
    digest: as received. kept, repaired_frames: as received, once the item is complete.
    last_rows: [1 + embed_levels, min(K, block_tokens − 1), D], the last embeddings, once the item is complete. The last
        row of an item rarely ends a block, and only full blocks are cached: a prompt that continues differently
        computes the few rows after the last full block again, for which it would otherwise need the whole item. They
        stay on the host, because there are many, and the device's memory is budgeted at startup.
    """

    __slots__ = ("__weakref__", "digest", "id", "kept", "last_rows", "repaired_frames")

    def __init__(self, id: int, digest: bytes) -> None:
        self.id = id
        self.digest = digest
        self.kept: Int32Array | None = None
        self.repaired_frames = 0
        self.last_rows: Tensor | None = None

    def finish(self, item: MediaItem, max_last_rows: int) -> None:
        """Notes the complete item."""
        # Cloned: a view would keep the whole item in memory.
        self.last_rows = item.embeds[:, max(0, item.embeds.shape[1] - max_last_rows) :].clone()
        self.kept, self.repaired_frames = item.kept, item.repaired_frames
