"""Attention by torch's own SDPA, on any device, over a cache whose contexts are read in place or gathered.

    packed rows:  [s][s][s][   A   ][ B ]     singles first
    A, B:         one call each, causal from the row's own place in its sequence
    s, on a CPU:  where contexts are long, the longest run of neighbouring blocks is read in place, one call each; what
                  is left of all contexts is gathered into one rectangle, and the two are merged by their log-sums of
                  exponentials
    s, otherwise: whole contexts in the rectangle

      blocks of s:  [ 7  8  9 10 11 ][ 40 ][ 43 ]
                     in place         gathered, padded to the longest

A rectangle that would be too large is several, each of contexts of like length.

Padding repeats the first slot of the row's own sequence, so that nothing of another request, not even a NaN,
comes near it. It knows neither requests nor the scheduler.
Source: merging parts of one softmax, FlashAttention, arXiv 2205.14135.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from services.generation.model.attention.sizes import CacheSizes
from services.generation.request.batch import Context, Int64Array, Packed, slots_of
from services.generation.to_device import to_device

# Below this many tokens a row, copying all contexts for one call is cheaper than a call each.
IN_PLACE_TOKENS = 512

# Of keys and of values, at most so many tokens a layer are gathered into one rectangle, unless one context is longer.
MOST_GATHERED_TOKENS = 65536

# Where torch says that no kernel takes both a mask and kv heads that query heads share: it would go by the formula,
# with all scores in memory. Repeating the kv heads takes far less.
REPEATING_DEVICES = ("cuda",)

# Where contexts stand in the cache: a slice where one sequence's blocks are neighbours (read in place), else int64
# [sequences, context].
Slots: TypeAlias = slice | Tensor


class SdpaCache:
    """Keys and values of every layer: [kv_heads, slots, head_dim] each, a block being neighbouring slots."""

    gathers = True

    def __init__(self, sizes: CacheSizes, like: Tensor) -> None:
        self.sizes = sizes
        shape = (sizes.layers, sizes.kv_heads, (sizes.blocks + 1) * sizes.block_tokens, sizes.head_dim)
        self.keys = list(like.new_zeros(shape).unbind())
        self.values = list(like.new_zeros(shape).unbind())

    def batch(self, packed: Packed) -> SdpaBatch:
        """What `PagedCache.batch` says."""
        like = self.keys[0]
        views: list[WindowView] = []
        at = packed.num_decodes
        for each in packed.contexts[packed.num_decodes :]:
            mask = None
            if each.start:
                seen = torch.ones(each.tokens, each.end, dtype=torch.bool, device=like.device).tril(each.start)
                mask = _additive(seen, like)[None, None]
            views.append(WindowView(at, at + each.tokens, _slots(self, each), mask))
            at += each.tokens
        new_slots = to_device(packed.slots, like.device)
        return SdpaBatch(self, new_slots, tuple(_singles(self, packed.contexts[: packed.num_decodes])), tuple(views))

    def decode_batch(self, table: Tensor, lengths: Tensor) -> SdpaBatch:
        """What `PagedCache.decode_batch` says."""
        block_tokens = self.sizes.block_tokens
        within = torch.arange(block_tokens, device=table.device)
        slots = (table.long()[:, :, None] * block_tokens + within).flatten(1)  # [R, W · block_tokens]
        seen = torch.arange(slots.shape[1], device=table.device) < lengths[:, None]
        new_slots = slots.gather(1, lengths.long()[:, None] - 1)[:, 0]
        singles = Singles(
            rows=slice(0, len(slots)),
            runs=(),
            slots=slots.where(seen, slots[:, :1]),
            mask=_additive(seen, self.keys[0])[:, None, None],
        )
        return SdpaBatch(self, new_slots, (singles,), ())


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
class Singles:
    """Rows of the packed batch that are windows of a single token, all or some of them.

    rows: which, or int64 [count].
    runs: what each reads in place; none where everything is gathered.
    slots: int64 [count, longest], the rest of their contexts, padded; None where there is no rest.
    mask: [count, 1, 1, longest], added to the scores.
    """

    rows: slice | Tensor
    runs: tuple[slice, ...]
    slots: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class SdpaBatch:
    """What attention must know of one packed forward.

    new_slots: int64 [T], where the keys and values of the packed rows go.
    """

    cache: SdpaCache
    new_slots: Tensor
    singles: tuple[Singles, ...]
    windows: tuple[WindowView, ...]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """What `Batch.attend` says."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.index_copy_(1, self.new_slots, key)
        values.index_copy_(1, self.new_slots, value)
        (heads, rows, head_dim), kv_heads = query.shape, key.shape[0]
        out = torch.empty((rows, heads, head_dim), dtype=query.dtype, device=query.device)
        for singles in self.singles:
            # The query heads that share a kv head become its query rows, so nothing is repeated.
            grouped = query[:, singles.rows].transpose(0, 1).unflatten(1, (kv_heads, -1))
            out[singles.rows] = _attend_singles(singles, grouped, keys, values, scaling).flatten(1, 2)
        for view in self.windows:
            own_keys, own_values, shared = _read(keys, view.slots), _read(values, view.slots), heads // kv_heads
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


def _attend_singles(singles: Singles, rows: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
    """rows: [S, kv_heads, query heads of each, head_dim], and so is what it returns."""
    parts: list[tuple[Tensor, Tensor]] = []
    if singles.runs:
        found = [
            _attend(row[None], _read(keys, run), _read(values, run), None, scaling)
            for row, run in zip(rows, singles.runs, strict=True)
        ]
        parts.append((torch.cat([attended for attended, _ in found]), torch.cat([log_sum for _, log_sum in found])))
    if singles.slots is not None:
        read = _read(keys, singles.slots), _read(values, singles.slots)
        if not parts:
            return F.scaled_dot_product_attention(rows, *read, attn_mask=singles.mask, scale=scaling)
        parts.append(_attend(rows, *read, singles.mask, scaling))
    if len(parts) == 1:
        return parts[0][0]
    (in_place, log_sum), (gathered, gathered_log_sum) = parts
    share = (log_sum - gathered_log_sum).sigmoid()[..., None]
    return torch.lerp(gathered.float(), in_place.float(), share)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """What SDPA does on a CPU, and the logarithm of each row's sum of exponentials: float32 [.., rows]."""
    attended, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=mask, scale=scaling
    )
    return attended, log_sum


def _read(layer: Tensor, slots: Slots) -> Tensor:
    """What of a layer's keys or values `slots` hold: [sequences, kv_heads, context, head_dim]."""
    if isinstance(slots, slice):
        return layer[None, :, slots]
    # Five times as fast as indexing by a tensor.
    rows: Tensor = layer.index_select(1, slots.view(-1))
    return rows.view(-1, *slots.shape, layer.shape[2]).transpose(0, 1)


def _singles(cache: SdpaCache, contexts: Sequence[Context]) -> Iterator[Singles]:
    if not contexts:
        return
    like = cache.keys[0]
    runs = [_longest_run(each, cache.sizes.block_tokens) for each in contexts]
    in_place = sum(run.stop - run.start for run in runs) >= IN_PLACE_TOKENS * len(runs) and like.device.type == "cpu"
    if not in_place:
        runs = [slice(0, 0)] * len(runs)
    rests = [_slots_around(each, run, cache.sizes.block_tokens) for each, run in zip(contexts, runs, strict=True)]
    read = [_in_cache(each, run, cache.sizes.block_tokens) for each, run in zip(contexts, runs, strict=True)]
    firsts = np.array([each.blocks[0] * cache.sizes.block_tokens for each in contexts])
    sizes = np.array([rest.size for rest in rests])
    for rows in _of_like_size(sizes):
        slots = mask = None
        if longest := sizes[rows].max():
            seen = np.arange(longest) < sizes[rows, None]
            table = np.repeat(firsts[rows, None], longest, axis=1)
            table[seen] = np.concatenate([rests[row] for row in rows])
            slots = to_device(table, like.device)
            mask = _additive(to_device(seen, like.device), like)[:, None, None]
        yield Singles(
            slice(0, len(rows)) if len(rows) == len(contexts) else to_device(rows, like.device),
            tuple(read[row] for row in rows) if in_place else (),
            slots,
            mask,
        )


def _of_like_size(sizes: Int64Array) -> Iterator[Int64Array]:
    """Indices of all sizes, in parts that are no larger than may be once each is padded to its longest."""
    if sizes.size * sizes.max() <= MOST_GATHERED_TOKENS:
        yield np.arange(sizes.size)
        return
    left = np.argsort(-sizes, kind="stable")
    while left.size:
        count = max(1, MOST_GATHERED_TOKENS // max(1, int(sizes[left[0]])))
        yield left[:count]
        left = left[count:]


def _longest_run(context: Context, block_tokens: int) -> slice:
    """The tokens of a sequence that stand in the most neighbouring blocks."""
    blocks = np.array(context.blocks)
    borders = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), blocks.size]
    first, last = max(pairwise(borders), key=lambda run: run[1] - run[0])
    return slice(first * block_tokens, min(last * block_tokens, context.end))


def _slots_around(context: Context, run: slice, block_tokens: int) -> Int64Array:
    """Where the tokens of a sequence stand that come before `run` and after it."""
    before = slots_of(context.blocks, 0, run.start, block_tokens)
    return np.concatenate([before, slots_of(context.blocks, run.stop, context.end, block_tokens)])


def _in_cache(context: Context, run: slice, block_tokens: int) -> slice:
    """The slots of a run of tokens that stand in neighbouring blocks."""
    first = context.blocks[run.start // block_tokens] * block_tokens
    return slice(first, first + run.stop - run.start)


def _slots(cache: SdpaCache, context: Context) -> Slots:
    """The slots of a sequence from its first token to its last."""
    blocks = context.blocks
    first = blocks[0]
    if blocks == list(range(first, first + len(blocks))):
        return slice(first * cache.sizes.block_tokens, first * cache.sizes.block_tokens + context.end)
    slots = slots_of(blocks, 0, context.end, cache.sizes.block_tokens)
    return to_device(slots, cache.keys[0].device)[None]


def _additive(seen: Tensor, like: Tensor) -> Tensor:
    """0 where `seen`, elsewhere what leaves nothing: made once a step, where SDPA would convert a boolean mask a layer.

    Not −inf: a row that sees nothing has a finite sum of exponentials then, and no share beside what is read in place.
    """
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(
        ~seen, torch.finfo(like.dtype).min
    )
