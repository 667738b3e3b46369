"""Attention over the paged cache, as transformers calls it: once a layer, for the whole packed batch.

It owns the cache's tensors and how a device reads them, and knows neither requests nor the scheduler.

    packed rows:  [s][s][s][   A   ][ B ]     singles first: one rectangle, padded to the longest context
    A, B:         one call each, causal from the row's own place in its sequence

Padding repeats the first slot of the row's own sequence, so that nothing of another request, not even a NaN, comes
near it. Source: PagedAttention, arXiv 2309.06180; `transformers.AttentionInterface`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from services.generation.windows import Packed, Window, slots_of

ATTENTION = "framesieve_paged"

# Where contexts stand in the cache: a slice where one sequence's blocks are neighbours (read in place), else int64
# [sequences, context].
Slots: TypeAlias = slice | Tensor


class KVCache:
    """Keys and values of every layer: [slots, kv_heads, head_dim] each, a block being neighbouring slots."""

    def __init__(self, layers: int, blocks: int, block_tokens: int, kv_heads: int, head_dim: int, like: Tensor) -> None:
        self.block_tokens = block_tokens
        self.blocks = blocks
        shape = (layers, blocks * block_tokens, kv_heads, head_dim)
        self.keys = list(like.new_zeros(shape).unbind())
        self.values = list(like.new_zeros(shape).unbind())


@dataclass(frozen=True, slots=True)
class WindowView:
    """Rows [first_row, end_row) of the packed batch, which see the sequence that `slots` hold.

    mask: [1, 1, rows, context], added to the scores; None where the window starts its sequence.
    """

    first_row: int
    end_row: int
    slots: Slots
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Batch:
    """What attention must know of one packed forward.

    new_slots: int64 [T], where the keys and values of the packed rows go.
    singles: how many rows, from the first, are windows of a single token.
    single_slots: their contexts, padded to the longest.
    single_mask: [singles, 1, 1, longest context], added to the scores; None for one single.
    """

    cache: KVCache
    new_slots: Tensor
    singles: int
    single_slots: Slots
    single_mask: Tensor | None
    windows: tuple[WindowView, ...]


def make_batch(cache: KVCache, packed: Packed) -> Batch:
    """Everything about a packed forward that is the same for each of its layers."""
    like = cache.keys[0]
    singles = packed.windows[: packed.singles]
    single_slots, single_mask = _rectangle(cache, singles)
    views: list[WindowView] = []
    at = packed.singles
    for window in packed.windows[packed.singles :]:
        mask = None
        if window.start:
            seen = torch.ones(window.tokens, window.end, dtype=torch.bool, device=like.device).tril(window.start)
            mask = _additive(seen, like)[None, None]
        views.append(WindowView(at, at + window.tokens, _slots(cache, window), mask))
        at += window.tokens
    new_slots = torch.from_numpy(packed.slots).to(like.device)
    return Batch(cache, new_slots, packed.singles, single_slots, single_mask, tuple(views))


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,  # [1, kv_heads, T, head_dim]
    attention_mask: None,
    *,
    batch: Batch,
    scaling: float,
    **_: object,
) -> tuple[Tensor, None]:
    """Writes the new keys and values, then attends every row to its own sequence. Returns [1, T, heads, head_dim]."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    keys, values = batch.cache.keys[layer], batch.cache.values[layer]
    keys.index_copy_(0, batch.new_slots, key[0].transpose(0, 1))
    values.index_copy_(0, batch.new_slots, value[0].transpose(0, 1))
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
    out = torch.empty((query.shape[2], heads, head_dim), dtype=query.dtype, device=query.device)
    if batch.singles:
        # The query heads that share a kv head become its query rows, so nothing is repeated.
        rows = query[0, :, : batch.singles].transpose(0, 1).reshape(batch.singles, kv_heads, -1, head_dim)
        single = F.scaled_dot_product_attention(
            rows,
            _read(keys, batch.single_slots),
            _read(values, batch.single_slots),
            attn_mask=batch.single_mask,
            scale=scaling,
        )
        out[: batch.singles] = single.reshape(batch.singles, heads, head_dim)
    for view in batch.windows:
        attended = F.scaled_dot_product_attention(
            query[:, :, view.first_row : view.end_row],
            _read(keys, view.slots),
            _read(values, view.slots),
            attn_mask=view.mask,
            is_causal=view.mask is None,
            scale=scaling,
            enable_gqa=heads != kv_heads,
        )
        out[view.first_row : view.end_row] = attended[0].transpose(0, 1)
    return out[None], None


def _read(layer: Tensor, slots: Slots) -> Tensor:
    """What of a layer's keys or values `slots` hold: [sequences, kv_heads, context, head_dim]."""
    if isinstance(slots, slice):
        return layer[slots].transpose(0, 1)[None]
    # Five times as fast as indexing by a tensor.
    rows = layer.index_select(0, slots.view(-1))
    return rows.view(*slots.shape, *layer.shape[1:]).transpose(1, 2)


def _rectangle(cache: KVCache, singles: Sequence[Window]) -> tuple[Slots, Tensor | None]:
    if not singles:
        return slice(0, 0), None
    if len(singles) == 1:
        return _slots(cache, singles[0]), None
    like = cache.keys[0]
    longest = max(window.end for window in singles)
    columns = -(-longest // cache.block_tokens)
    table = np.array([_padded(window.request.blocks, columns) for window in singles], np.int64)
    slots = (table[:, :, None] * cache.block_tokens + np.arange(cache.block_tokens)).reshape(len(singles), -1)
    seen = np.arange(longest) < np.array([window.end for window in singles])[:, None]
    slots = np.where(seen, slots[:, :longest], slots[:, :1])
    return (
        torch.from_numpy(slots).to(like.device),
        _additive(torch.from_numpy(seen).to(like.device), like)[:, None, None],
    )


def _padded(blocks: Sequence[int], columns: int) -> list[int]:
    return [*blocks[:columns], *[blocks[0]] * (columns - len(blocks))]


def _slots(cache: KVCache, window: Window) -> Slots:
    """The slots of a window's sequence from its first token to the window's end."""
    blocks = window.request.blocks[: -(-window.end // cache.block_tokens)]
    first = blocks[0]
    if blocks == list(range(first, first + len(blocks))):
        return slice(first * cache.block_tokens, first * cache.block_tokens + window.end)
    slots = slots_of(blocks, 0, window.end, cache.block_tokens)
    return torch.from_numpy(slots).to(cache.keys[0].device)[None]


def _additive(seen: Tensor, like: Tensor) -> Tensor:
    """0 where `seen`, −inf elsewhere: made once a step, where SDPA would convert a boolean mask once a layer."""
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)


AttentionInterface.register(ATTENTION, paged_attention)
