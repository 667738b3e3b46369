"""One media item of a request as the encoder sent it, and what stays of it after the request."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from framesieve.common.contract.plan import Int32Array


@dataclass(frozen=True, slots=True, eq=False)
class MediaItem:
    """A received item, checked against the plan.

    kept: int32 [K], strictly increasing; None if all tokens were kept.
    embeds: [1 + embed_levels, K, hidden_size] in the model's dtype, finite, on the host.
    digest: equal only for items whose kept and embeddings are equal to the last bit, as they were sent.
    """

    media_index: int
    kept: Int32Array | None
    embeds: Tensor
    repaired_frames: int
    digest: bytes


class EncodedMedia:
    """The identity of an item's encoding, and its last rows.

    id: from 1, unique among all encodings.
    digest, kept, repaired_frames: as received.
    last_rows: [1 + embed_levels, min(K, block_tokens − 1), D], the last embeddings. The last row of an item rarely
        ends a block, and only full blocks are cached: a prompt that continues differently computes the few rows after
        the last full block again, for which it would otherwise need the whole item. They stay on the host, because
        there are many, and the device's memory is budgeted at startup.
    """

    __slots__ = ("__weakref__", "digest", "id", "kept", "last_rows", "repaired_frames")

    def __init__(self, id: int, item: MediaItem, last_rows: Tensor) -> None:  # noqa: A002  (the usual name)
        self.id = id
        self.digest = item.digest
        self.kept = item.kept
        self.repaired_frames = item.repaired_frames
        self.last_rows = last_rows
