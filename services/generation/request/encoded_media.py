"""One media item of a request, as the encoder sent it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from common.contract.plan import Int32Array


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
