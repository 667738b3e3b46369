"""Attention by torch's SDPA in which a row's numbers depend on its own sequence and place alone, to the last bit.

    rows of a chunk:    [ r r r r ][ r r · · ]        a few tokens at a time, always as many; ·: the last one again
    tokens they read:   [ KEYS ][ KEYS ][ KEYS ]      whole parts from the first token on, those after a row masked
                                                      one call for each few

torch's kernel takes KEYS keys at a time, in order, and merges their softmax with that of the keys before. So all of its
products have the same shape, and parts that are masked as a whole add nothing. One sequence is computed at a time,
because on some processors the number of sequences decides how the kernel multiplies.
Source: FlashAttention 2, arXiv 2307.08691; `kvSplitSize` in aten/src/ATen/native/cpu/FlashAttentionKernel.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gridsieve.services.compute.transfers import to_device
from gridsieve.services.generation.model.attention.cache import write
from gridsieve.services.generation.model.attention.sdpa import SdpaCache, additive, read_slots, table_of
from gridsieve.services.generation.request.batch import Context, Packed

KEYS = 512
# Rows of one call, of query heads that share a KV head: fewer cost a prompt time, more cost a decode step time.
QUERY_ROWS = 16


class FixedSdpaCache(SdpaCache):
    """Implements `PagedCache`."""

    def batch(self, packed: Packed) -> FixedBatch:
        device, chunks, at = self.keys[0].device, list[_Chunk](), 0
        for context in packed.contexts:
            chunks.append(self._chunk(at, context))
            at += context.tokens
        return FixedBatch(self, to_device(packed.slots, device), tuple(chunks))

    def _chunk(self, at: int, context: Context) -> _Chunk:
        """at: its first packed row."""
        device, shared = self.keys[0].device, self.sizes.heads // self.sizes.kv_heads
        count = max(1, QUERY_ROWS // shared)
        groups = -(-context.tokens // count)
        rows = np.minimum(np.arange(groups * count), context.tokens - 1).reshape(groups, count)
        ends = context.start + rows.max(1) + 1
        lengths = -(-ends // KEYS) * KEYS
        slots = table_of(self, [context], [context.end], int(lengths[-1]))
        masks = []
        for own, length in zip(rows, lengths, strict=True):
            seen = np.arange(length) <= context.start + np.repeat(own, shared)[:, None]
            masks.append(additive(to_device(seen, device), self.dtype)[None, None])
        return _Chunk(slice(at, at + context.tokens), to_device(rows, device), to_device(slots, device), tuple(masks))


@dataclass(frozen=True, slots=True)
class _Chunk:
    """rows: of the packed batch. groups: int64 [G, n], places in `rows`. slots: int64 [1, length], of the sequence,
    padded. masks: of each group, [1, 1, n · query heads per KV head, its length], added to the scores.
    """

    rows: slice
    groups: Tensor
    slots: Tensor
    masks: tuple[Tensor, ...]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """query: [heads, tokens, head_dim]; keys, values: those of a layer. Returns [tokens, heads, head_dim]."""
        count, kv_heads = self.groups.shape[1], len(keys)
        key, value = read_slots(keys, self.slots, query.dtype), read_slots(values, self.slots, query.dtype)
        # [G, kv_heads, n, query heads per KV head, head_dim]
        grouped = query[:, self.groups].unflatten(0, (kv_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = torch.cat(
            [
                _attend(rows[None], key[:, :, : mask.shape[3]], value[:, :, : mask.shape[3]], mask, scaling)
                for rows, mask in zip(grouped.flatten(2, 3), self.masks, strict=True)
            ]
        )
        apart: Tensor = attended.unflatten(2, (count, -1)).permute(0, 2, 1, 3, 4)
        return apart.flatten(2, 3).flatten(0, 1)[: query.shape[1]]


@dataclass(frozen=True, slots=True)
class FixedBatch:
    """Implements `Batch`. Rows in no chunk are zeros. new_slots: int64 [T], of keys and values of the packed rows."""

    cache: FixedSdpaCache
    new_slots: Tensor
    chunks: tuple[_Chunk, ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        write(keys, 1, self.new_slots, key)
        write(values, 1, self.new_slots, value)
        heads, rows, head_dim = query.shape
        out = query.new_zeros(rows, heads, head_dim)
        for each in self.chunks:
            out[each.rows] = each.attend(query[:, each.rows], keys, values, scaling)
        return out


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """The kernel that computes blocks of queries and keys one by one, and no other. Raises RuntimeError without it."""
    if query.device.type == "cpu":
        found, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, attn_mask=mask, scale=scaling
        )
    else:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            found = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling)
    attended: Tensor = found
    return attended
