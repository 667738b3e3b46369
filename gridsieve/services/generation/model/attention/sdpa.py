"""Attention by torch's SDPA, on any device, over a paged cache whose contexts are read in place or gathered.

    packed rows:  [s][s][s][   A   ][ B ]     single-token chunks first
    A, B:         one call each, causal from the row's position in its sequence; by `products` where they are faster
    s, on a CPU:  if contexts are long, the longest run of adjacent blocks of each is read in place, by one call each;
                  the rest of all contexts is gathered into one padded tensor; the two results are merged by their
                  log-sum-exp
    s, otherwise: whole contexts are gathered into the padded tensor
    short chunks: those of one size, as of draft tokens, are one call over padded contexts, unless these are long

      blocks of s:  [ 7  8  9 10 11 ][ 40 ][ 43 ]
                     in place         gathered, padded to the longest

If the padded tensor would be too large it is split into several, each for contexts of similar length.

Padding repeats the first slot of the row's own sequence: a NaN in another request's slots would survive the mask. This
module knows neither requests nor the scheduler.
Source: merging parts of one softmax, FlashAttention, arXiv 2205.14135.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gridsieve.services.compute.transfers import to_device
from gridsieve.services.generation.model.attention import products
from gridsieve.services.generation.model.attention.cache import FP8, Batch, CacheSizes, write
from gridsieve.services.generation.request.batch import Context, Int64Array, Packed, slots_of

# Below this many tokens per row, gathering all contexts for one call is cheaper than one call for each.
IN_PLACE_TOKENS = 512

# Chunks of so many tokens at most are computed together: they are drafts, which many sequences have at once.
SHORT_TOKENS = 16

# Maximum number of tokens gathered into one padded tensor of keys, and of values, unless a single context is longer.
MAX_GATHERED_TOKENS = 65536

# Devices where torch has no fused kernel for a mask together with grouped KV heads. Its fallback materialises all
# scores; repeating the KV heads takes far less memory.
REPEATING_DEVICES = ("cuda",)

# The slots of contexts: a slice if the blocks of one sequence are adjacent (read in place), else int64
# [sequences, context].
Slots: TypeAlias = slice | Tensor


class SdpaCache:
    """Implements `PagedCache`. Keys and values of every layer: [kv_heads, slots, head_dim] each; a block is
    `block_tokens` adjacent slots.
    """

    captures = False

    def __init__(self, sizes: CacheSizes, like: Tensor) -> None:
        self.sizes, self.dtype = sizes, like.dtype
        shape = (sizes.layers, sizes.kv_heads, (sizes.blocks + 1) * sizes.block_tokens, sizes.head_dim)
        self.keys = list(like.new_zeros(shape, dtype=sizes.dtype(like)).unbind())
        self.values = list(like.new_zeros(shape, dtype=sizes.dtype(like)).unbind())

    def batch(self, packed: Packed) -> Batch:
        views, short = list[ChunkView](), defaultdict[int, list[tuple[int, Context]]](list)
        at = packed.num_decodes
        for each in packed.contexts[packed.num_decodes :]:
            if each.start and each.tokens <= SHORT_TOKENS:
                short[each.tokens].append((at, each))
            else:
                views.append(_view(self, at, each))
            at += each.tokens
        together = list[ShortChunks]()
        for alike in short.values():
            ends = [each.end for _, each in alike]
            if (
                len(ends) > 1
                and sum(ends) < len(ends) * IN_PLACE_TOKENS
                and len(ends) * max(ends) < MAX_GATHERED_TOKENS
            ):
                together.append(_short(self, alike))
            else:
                views += [_view(self, *each) for each in alike]
        new_slots, decodes = to_device(packed.slots, self.keys[0].device), packed.contexts[: packed.num_decodes]
        return SdpaBatch(self, new_slots, tuple(_decodes(self, decodes)), tuple(together), tuple(views))

    def read_keys(self, layer: int, slots: Tensor) -> Tensor:
        return read_slots(self.keys[layer], slots[None], self.dtype)[0]

    def ahead(self, contexts: Sequence[Context], count: int) -> Ahead | None:
        """None if what it would gather is too large."""
        lengths = [each.start for each in contexts]
        longest = max(lengths)
        if len(lengths) * longest > MAX_GATHERED_TOKENS:
            return None
        device, mask = self.keys[0].device, None
        if min(lengths) < longest:
            seen = np.arange(longest + count) < np.array(lengths)[:, None]
            seen[:, longest:] = True
            mask = additive(to_device(seen, device), self.dtype)[:, None, None]
        slots = to_device(table_of(self, contexts, lengths), device)
        keys, values = (_with_room(each[0], slots, count, self.dtype) for each in (self.keys, self.values))
        return Ahead(keys, values, mask, longest)


@dataclass(frozen=True, slots=True)
class ChunkView:
    """One multi-token chunk: rows [first_row, end_row) of the packed batch and the slots of their sequence.

    mask: [1, 1, rows, context], added to the scores; None if the chunk starts its sequence, or `by_products`.
    by_products: whether it is computed by `products` and not by SDPA.
    """

    first_row: int
    end_row: int
    slots: Slots
    mask: Tensor | None
    by_products: bool


@dataclass(frozen=True, slots=True)
class Decodes:
    """Some or all of the packed rows that are single-token chunks.

    rows: their indices, as a slice or int64 [count].
    runs: the slots that each reads in place; empty if everything is gathered.
    slots: int64 [count, longest], the rest of their contexts, padded; None if nothing is left.
    mask: [count, 1, 1, longest], added to the scores.
    """

    rows: slice | Tensor
    runs: tuple[slice, ...]
    slots: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class ShortChunks:
    """Chunks of n tokens each, of S sequences.

    rows: int64 [S · n], of the packed batch. slots: int64 [S, longest], their contexts, padded. mask: [S, 1, n · query
    heads per KV head, longest], added to the scores.
    """

    rows: Tensor
    slots: Tensor
    mask: Tensor

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """query: [heads, S · n, head_dim]; keys, values: those of a layer. Returns [S · n, heads, head_dim]."""
        sequences, kv_heads = len(self.slots), len(keys)
        query = query.unflatten(0, (kv_heads, -1)).unflatten(2, (sequences, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(
            query.flatten(2, 3),  # [S, kv_heads, n · query heads per KV head, head_dim]
            read_slots(keys, self.slots, query.dtype),
            read_slots(values, self.slots, query.dtype),
            attn_mask=self.mask,
            scale=scaling,
        )
        apart: Tensor = attended.unflatten(2, query.shape[2:4])
        return apart.permute(0, 2, 1, 3, 4).flatten(2, 3).flatten(0, 1)


@dataclass(frozen=True, slots=True)
class SdpaBatch:
    """Implements `Batch`. new_slots: int64 [T], where the keys and values of the packed rows are written."""

    cache: SdpaCache
    new_slots: Tensor
    decodes: tuple[Decodes, ...]
    short: tuple[ShortChunks, ...]
    chunks: tuple[ChunkView, ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        write(keys, 1, self.new_slots, key)
        write(values, 1, self.new_slots, value)
        (heads, rows, head_dim), kv_heads = query.shape, key.shape[0]
        out = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=query.device)
        for decodes in self.decodes:
            # The query heads that share a KV head become query rows of that head, so no keys are repeated.
            grouped = query[:, decodes.rows].transpose(0, 1).unflatten(1, (kv_heads, -1))
            out[decodes.rows] = _attend_decodes(decodes, grouped, keys, values, scaling).flatten(1, 2)
        for each in self.short:
            out[each.rows] = each.attend(query[:, each.rows], keys, values, scaling)
        for view in self.chunks:
            own_keys, own_values = (read_slots(each, view.slots, query.dtype) for each in (keys, values))
            shared = heads // kv_heads
            if view.by_products:
                asking = query[:, view.first_row : view.end_row]
                out[view.first_row : view.end_row] = products.attend(asking, own_keys[0], own_values[0], scaling)
                continue
            if view.mask is not None and query.device.type in REPEATING_DEVICES:
                own_keys, own_values = own_keys.repeat_interleave(shared, 1), own_values.repeat_interleave(shared, 1)
                shared = 1
            attended = F.scaled_dot_product_attention(
                query[None, :, view.first_row : view.end_row],
                own_keys,
                own_values,
                attn_mask=view.mask,
                is_causal=view.mask is None,
                scale=scaling,
                enable_gqa=shared > 1,
            )
            out[view.first_row : view.end_row] = attended[0].transpose(0, 1)
        return out


@dataclass(slots=True)
class Ahead:
    """Implements `Batch`, for rows of `PagedCache.ahead`. end: of the tokens and rows so far.

    keys, values: [S, kv_heads, longest context + rows, head_dim], contexts padded. mask: [S, 1, 1, the same], added to
    the scores; None without padding.
    """

    keys: Tensor
    values: Tensor
    mask: Tensor | None
    end: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        self.keys[:, :, self.end], self.values[:, :, self.end] = key.transpose(0, 1), value.transpose(0, 1)
        self.end += 1
        attended = F.scaled_dot_product_attention(
            query.transpose(0, 1).unflatten(1, (key.shape[0], -1)),
            self.keys[:, :, : self.end],
            self.values[:, :, : self.end],
            attn_mask=None if self.mask is None else self.mask[..., : self.end],
            scale=scaling,
        )
        return attended.flatten(1, 2).contiguous()


def _attend_decodes(decodes: Decodes, rows: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """rows: [S, kv_heads, query heads per KV head, head_dim]; returns the same shape."""
    parts: list[tuple[Tensor, Tensor]] = []
    if decodes.runs:
        found = [
            _attend(row[None], read_slots(keys, run, rows.dtype), read_slots(values, run, rows.dtype), None, scaling)
            for row, run in zip(rows, decodes.runs, strict=True)
        ]
        parts.append((torch.cat([attended for attended, _ in found]), torch.cat([log_sum for _, log_sum in found])))
    if decodes.slots is not None:
        read = read_slots(keys, decodes.slots, rows.dtype), read_slots(values, decodes.slots, rows.dtype)
        if not parts:
            return F.scaled_dot_product_attention(rows, *read, attn_mask=decodes.mask, scale=scaling)
        parts.append(_attend(rows, *read, decodes.mask, scaling))
    if len(parts) == 1:
        return parts[0][0]
    (in_place, log_sum), (gathered, gathered_log_sum) = parts
    share = (log_sum - gathered_log_sum).sigmoid()[..., None]
    return torch.lerp(gathered.float(), in_place.float(), share)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """SDPA on a CPU. Also returns the log-sum-exp of each row's scores, float32 [.., rows]."""
    attended, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask, scale=scaling
    )
    return attended, log_sum


def read_slots(layer: Tensor, slots: Slots, dtype: torch.dtype) -> Tensor:
    """Reads slots of a layer's keys or values in the model's dtype: [sequences, kv_heads, context, head_dim]."""
    if isinstance(slots, slice):
        return layer[None, :, slots].to(dtype)
    stored = layer.view(torch.uint8) if layer.dtype == FP8 else layer
    # index_select is five times as fast as indexing by a tensor.
    rows = stored.index_select(1, slots.view(-1)).view(layer.dtype).to(dtype)
    return rows.view(-1, *slots.shape, layer.shape[2]).transpose(0, 1)


def _with_room(layer: Tensor, slots: Tensor, room: int, dtype: torch.dtype) -> Tensor:
    """As `read_slots`, with room for more tokens: [sequences, kv_heads, context + room, head_dim]."""
    sequences, context = slots.shape
    found = torch.empty((sequences, len(layer), context + room, layer.shape[2]), dtype=dtype, device=layer.device)
    found[:, :, :context] = read_slots(layer, slots, dtype)
    return found


def _view(cache: SdpaCache, at: int, context: Context) -> ChunkView:
    """Of the chunk whose first packed row is `at`."""
    mask, is_long = None, context.tokens > SHORT_TOKENS and context.end >= products.MIN_CONTEXT
    by_products = is_long and products.beat_sdpa(cache.keys[0].device.type, cache.dtype)
    if context.start and not by_products:
        seen = torch.ones(context.tokens, context.end, dtype=torch.bool, device=cache.keys[0].device)
        mask = additive(seen.tril(context.start), cache.dtype)[None, None]
    return ChunkView(at, at + context.tokens, _slots(cache, context), mask, by_products)


def _short(cache: SdpaCache, chunks: Sequence[tuple[int, Context]]) -> ShortChunks:
    """Of chunks of one size, each with its first packed row."""
    device, shared = cache.keys[0].device, cache.sizes.heads // cache.sizes.kv_heads
    tokens = np.arange(chunks[0][1].tokens)
    contexts = [each for _, each in chunks]
    starts = np.array([each.start for each in contexts])
    table = table_of(cache, contexts, [each.end for each in contexts])
    seen = np.arange(table.shape[1]) <= np.add.outer(starts, np.repeat(tokens, shared))[..., None]
    rows = np.add.outer([at for at, _ in chunks], tokens).reshape(-1)
    mask = additive(to_device(seen, device), cache.dtype)[:, None]
    return ShortChunks(to_device(rows, device), to_device(table, device), mask)


def table_of(cache: SdpaCache, contexts: Sequence[Context], lengths: Sequence[int], width: int = 0) -> Int64Array:
    """The slots of the first tokens of each sequence, padded with that of its first one: int64 [S, W].

    W: the longest length, or `width` if that is more.
    """
    size = cache.sizes.block_tokens
    table = np.empty((len(contexts), max(*lengths, width)), np.int64)
    for row, each, length in zip(table, contexts, lengths, strict=True):
        row[:length] = slots_of(each.blocks, 0, length, size)
        row[length:] = row[0]
    return table


def _decodes(cache: SdpaCache, contexts: Sequence[Context]) -> Iterator[Decodes]:
    if not contexts:
        return
    device = cache.keys[0].device
    block_tokens, runs, in_place = cache.sizes.block_tokens, [slice(0, 0)] * len(contexts), False
    if device.type == "cpu":
        found = [_longest_run(each, block_tokens) for each in contexts]
        in_place = sum(run.stop - run.start for run in found) >= IN_PLACE_TOKENS * len(found)
        runs = found if in_place else runs
    rests = [_slots_around(each, run, block_tokens) for each, run in zip(contexts, runs, strict=True)]
    read = [_in_cache(each, run, block_tokens) for each, run in zip(contexts, runs, strict=True)] if in_place else []
    firsts = np.array([each.blocks[0] * cache.sizes.block_tokens for each in contexts])
    sizes = np.array([rest.size for rest in rests])
    for rows in _of_like_size(sizes):
        slots = mask = None
        if longest := sizes[rows].max():
            seen = np.arange(longest) < sizes[rows, None]
            table = np.repeat(firsts[rows, None], longest, axis=1)
            table[seen] = np.concatenate([rests[row] for row in rows])
            slots = to_device(table, device)
            mask = additive(to_device(seen, device), cache.dtype)[:, None, None]
        yield Decodes(
            slice(0, len(rows)) if len(rows) == len(contexts) else to_device(rows, device),
            tuple(read[row] for row in rows) if in_place else (),
            slots,
            mask,
        )


def _of_like_size(sizes: Int64Array) -> Iterator[Int64Array]:
    """Splits the indices of `sizes` into groups that fit MAX_GATHERED_TOKENS when padded to their largest member."""
    if sizes.size * sizes.max() <= MAX_GATHERED_TOKENS:
        yield np.arange(sizes.size)
        return
    left = np.argsort(-sizes, kind="stable")
    while left.size:
        count = max(1, MAX_GATHERED_TOKENS // max(1, int(sizes[left[0]])))
        yield left[:count]
        left = left[count:]


def _longest_run(context: Context, block_tokens: int) -> slice:
    """The longest range of a sequence's tokens whose blocks are adjacent."""
    blocks = np.asarray(context.blocks)
    borders = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), blocks.size]
    first, last = max(pairwise(borders), key=lambda run: run[1] - run[0])
    return slice(first * block_tokens, min(last * block_tokens, context.end))


def _slots_around(context: Context, run: slice, block_tokens: int) -> Int64Array:
    """The slots of a sequence's tokens before and after `run`."""
    before = slots_of(context.blocks, 0, run.start, block_tokens)
    return np.concatenate([before, slots_of(context.blocks, run.stop, context.end, block_tokens)])


def _in_cache(context: Context, run: slice, block_tokens: int) -> slice:
    """The slots of a run of tokens whose blocks are adjacent."""
    first = int(context.blocks[run.start // block_tokens]) * block_tokens
    return slice(first, first + run.stop - run.start)


def _slots(cache: SdpaCache, context: Context) -> Slots:
    """The slots of all tokens of a sequence, in order."""
    block_tokens = cache.sizes.block_tokens
    run = _longest_run(context, block_tokens)
    if run == slice(0, context.end):
        return _in_cache(context, run, block_tokens)
    slots = slots_of(context.blocks, 0, context.end, block_tokens)
    return to_device(slots, cache.keys[0].device)[None]


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """An additive mask: 0 where `seen`, else the dtype's minimum. SDPA would convert a boolean mask in every layer.

    The minimum and not −inf: the log-sum-exp of a fully masked row stays finite, so its weight in the merge is 0.
    """
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
