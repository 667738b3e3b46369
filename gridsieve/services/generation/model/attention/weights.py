"""What rows attend to: softmax(q · K) over the cached keys of their sequence, summed over the layers of a forward.

    packed rows    [d][d][  chunk of A  ][  chunk of B  ]      the last rows of B are watched
    keys of B      [text][media ...][text][media .][text]      weights over all of them; those of media are kept

The step attends as any other does; after each layer, the keys of watched rows are read from the cache once more. It
knows neither requests nor the scheduler.
Source: scaled dot-product attention, arXiv 1706.03762.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gridsieve.services.compute.transfers import to_device
from gridsieve.services.generation.model.attention.cache import Batch, PagedCache
from gridsieve.services.generation.request.batch import Int64Array

# Values that one product reads or writes at most, in float32: 64 MiB.
PIECE_VALUES = 2**24


class WatchedRows:
    """R rows, the last ones of a sequence, and what is added up of their weights, in float32.

    slots: int64 [C], of the cache, those of the sequence up to the last row.
    """

    def __init__(self, rows: slice, slots: Tensor, media: Int64Array, sizes: Sequence[int], *, keeps: bool) -> None:
        """rows: of the packed batch. media: int64 [M], the places of media in the sequence, item by item. sizes: how
        many each item has. keeps: whether the weights of each row are kept, and not their sums alone.
        """
        count, device = rows.stop - rows.start, slots.device
        self.slots = slots
        self._rows, self._places = rows, torch.arange(len(slots), device=device)
        self._media = to_device(media, device)
        self._items = to_device(np.repeat(np.arange(len(sizes)), sizes), device)
        self._by_item = torch.zeros(count, len(sizes), device=device)
        self._total = torch.zeros(len(media), device=device)
        self._by_row = torch.zeros(count, len(media), device=device) if keeps else None
        self._added = 0  # heads of layers

    def means(self) -> list[Tensor]:
        """Means over heads and layers: [R, items], of each item; [M], the sum over the rows; if kept, [R, M]."""
        kept = [] if self._by_row is None else [self._by_row]
        return [each / self._added for each in (self._by_item, self._total, *kept)]

    def add(self, query: Tensor, keys: Tensor, scaling: float) -> None:
        """Adds the weights of a layer. query: [heads, T, head_dim]; keys: [kv_heads, context, head_dim]."""
        kv_heads, tokens, head_dim = keys.shape
        grouped = query[:, self._rows].unflatten(0, (kv_heads, -1))  # [kv_heads, query heads per KV head, R, head_dim]
        heads = min(kv_heads, max(1, PIECE_VALUES // (tokens * head_dim)))
        step = max(1, PIECE_VALUES // (heads * grouped.shape[1] * tokens))
        self._added += len(query)
        for first in range(0, grouped.shape[2], step):
            rows = slice(first, first + step)
            hidden = self._places > self._places[-grouped.shape[2] :][rows, None]
            weights = torch.zeros(hidden.shape, device=keys.device)
            for head in range(0, kv_heads, heads):
                own = grouped[head : head + heads, :, rows].float()
                scores = own.flatten(1, 2) @ keys[head : head + heads].float().mT * scaling
                scores = scores.unflatten(1, own.shape[1:3]).masked_fill_(hidden, -torch.inf)
                weights += scores.softmax(dim=-1).sum(dim=(0, 1))
            media = weights[:, self._media]
            self._total += media.sum(dim=0)
            self._by_item[rows].index_add_(1, self._items, media)
            if self._by_row is not None:
                self._by_row[rows] += media


@dataclass(frozen=True, slots=True)
class WatchedBatch:
    """Implements `Batch`: attends as `batch` does, and adds up what the watched rows attend to."""

    cache: PagedCache
    batch: Batch
    watched: Sequence[WatchedRows]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        attended = self.batch.attend(layer, query, key, value, scaling)
        for each in self.watched:
            each.add(query, self.cache.read_keys(layer, each.slots), scaling)
        return attended
