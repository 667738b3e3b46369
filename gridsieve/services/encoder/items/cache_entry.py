"""A cache entry: the embeddings of one media item, all made. Nothing of it changes any more but its scores, which are
added when a method first asks for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from gridsieve.common.contract.plan import Int32Array
from gridsieve.services.compute.transfers import Computed
from gridsieve.services.encoder.items.decoded_slices import SliceKey
from gridsieve.services.encoder.pruning.methods import Scores
from gridsieve.services.encoder.tower.tower import Tower


@dataclass(slots=True)
class StageTimes:
    """When all slices of an item had left each stage, on this host's monotonic clock; None: it skipped the stage.

    begun_ns: when the tower began the last forward. pruned_ns: set for one request's item, not for the shared entry.
    """

    decoded_ns: int | None = None
    resized_ns: int | None = None
    begun_ns: int = 0
    encoded_ns: int = 0
    pruned_ns: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class CacheEntry:
    """Embeddings of one media item, (1 + levels, tokens, D), before it is pruned by their scores, and these scores.

    key: its cache key; empty: it is of one request, and never cached. encoding: 32 bytes that name its embeddings:
    equal names mean equal bytes. kept: the tokens of the grid that it has, int32 (tokens,), increasing; None: all.
    rows: of the slices that others may copy. reference: what was last shown of each place, if it was asked for.
    size_bytes: that it takes in the cache: embeddings, and references or the scores of every method.
    scoring: held while scores are added, as items are gathered in several threads.
    """

    key: bytes
    encoding: bytes
    embeds: Tensor
    kept: Int32Array | None
    rows: Mapping[SliceKey, slice]
    times: StageTimes
    repaired_frames: int
    reference: bytes
    size_bytes: int
    scores: dict[str, Scores] = field(default_factory=dict)
    scoring: threading.Lock = field(default_factory=threading.Lock)


def copied_embeds(embeds: Tensor, tower: Tower) -> Tensor:
    """A copy of embeddings, (1 + levels, tokens, D), in the tower's dtype and on its device."""
    copied = tower.room_for(embeds.shape[1])
    copy_embeds(embeds, copied)
    return copied


def copy_embeds(embeds: Tensor, target: Tensor) -> None:
    """Returns once the copy is made. On CUDA, torch waits for the transfer and not for a conversion after it."""
    target.copy_(embeds)
    Computed(target.device).wait()
