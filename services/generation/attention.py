"""Attention over the paged cache, as transformers calls it: once a layer, for the whole packed batch.

It owns the cache's tensors and how a device reads them, and knows neither requests nor the scheduler.

    packed rows:  [s][s][s][   A   ][ B ]     singles first
    A, B:         one call each, causal from the row's own place in its sequence
    s, on a CPU:  where contexts are long, the longest run of neighbouring blocks is read in place, one call each; what
                  is left of all contexts is gathered into one rectangle, and the two are merged by their log-sums of
                  exponentials
    s, otherwise: whole contexts in the rectangle

      blocks of s:  [ 7  8  9 10 11 ][ 40 ][ 43 ]
                     in place         gathered, padded to the longest

Padding repeats the first slot of the row's own sequence, so that nothing of another request, not even a NaN,
comes near it. Sources: PagedAttention, arXiv 2309.06180; merging parts of one softmax, FlashAttention, arXiv
2205.14135; `transformers.AttentionInterface`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from services.generation.windows import Int64Array, Packed, Window, slots_of

ATTENTION = "framesieve_paged"

# Below this many tokens a row, copying all contexts for one call is cheaper than a call each.
IN_PLACE_TOKENS = 512

# Where contexts stand in the cache: a slice where one sequence's blocks are neighbours (read in place), else int64
# [sequences, context].
Slots: TypeAlias = slice | Tensor


class KVCache:
    """Keys and values of every layer: [kv_heads, slots, head_dim] each, a block being neighbouring slots."""

    def __init__(self, layers: int, blocks: int, block_tokens: int, kv_heads: int, head_dim: int, like: Tensor) -> None:
        self.block_tokens = block_tokens
        self.blocks = blocks
        shape = (layers, kv_heads, blocks * block_tokens, head_dim)
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
class Singles:
    """The first `count` rows of the packed batch, windows of a single token.

    runs: what each reads in place; none where everything is gathered.
    slots: int64 [count, longest], the rest of their contexts, padded; None where there is no rest.
    mask: [count, 1, 1, longest], added to the scores.
    """

    count: int
    runs: tuple[slice, ...]
    slots: Tensor | None
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class Batch:
    """What attention must know of one packed forward.

    new_slots: int64 [T], where the keys and values of the packed rows go.
    """

    cache: KVCache
    new_slots: Tensor
    singles: Singles | None
    windows: tuple[WindowView, ...]


def make_batch(cache: KVCache, packed: Packed) -> Batch:
    """Everything about a packed forward that is the same for each of its layers."""
    like = cache.keys[0]
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
    return Batch(cache, new_slots, _singles(cache, packed.windows[: packed.singles]), tuple(views))


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
    keys.index_copy_(1, batch.new_slots, key[0])
    values.index_copy_(1, batch.new_slots, value[0])
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], query.shape[3]
    out = torch.empty((query.shape[2], heads, head_dim), dtype=query.dtype, device=query.device)
    if batch.singles:
        count = batch.singles.count
        # The query heads that share a kv head become its query rows, so nothing is repeated.
        rows = query[0, :, :count].transpose(0, 1).reshape(count, kv_heads, -1, head_dim)
        out[:count] = _attend_singles(batch.singles, rows, keys, values, scaling).reshape(count, heads, head_dim)
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


def _singles(cache: KVCache, windows: Sequence[Window]) -> Singles | None:
    if not windows:
        return None
    like = cache.keys[0]
    runs = [_longest_run(window, cache.block_tokens) for window in windows]
    in_place = sum(run.stop - run.start for run in runs) >= IN_PLACE_TOKENS * len(runs) and like.device.type == "cpu"
    if not in_place:
        runs = [slice(0, 0)] * len(runs)
    rests = [_slots_around(window, run, cache.block_tokens) for window, run in zip(windows, runs, strict=True)]
    slots = mask = None
    if longest := max(rest.size for rest in rests):
        seen = np.arange(longest) < np.array([rest.size for rest in rests])[:, None]
        firsts = [window.request.blocks[0] * cache.block_tokens for window in windows]
        table = np.repeat(np.array(firsts)[:, None], longest, axis=1)
        table[seen] = np.concatenate(rests)
        slots = torch.from_numpy(table).to(like.device)
        mask = _additive(torch.from_numpy(seen).to(like.device), like)[:, None, None]
    read = tuple(_in_cache(window, run, cache.block_tokens) for window, run in zip(windows, runs, strict=True))
    return Singles(len(windows), read if in_place else (), slots, mask)


def _longest_run(window: Window, block_tokens: int) -> slice:
    """The tokens of a window's sequence that stand in the most neighbouring blocks."""
    blocks = np.array(window.request.blocks[: -(-window.end // block_tokens)])
    borders = [0, *(np.flatnonzero(np.diff(blocks) != 1) + 1).tolist(), blocks.size]
    first, last = max(pairwise(borders), key=lambda run: run[1] - run[0])
    return slice(first * block_tokens, min(last * block_tokens, window.end))


def _slots_around(window: Window, run: slice, block_tokens: int) -> Int64Array:
    """Where the tokens of a window's sequence stand that come before `run` and after it."""
    blocks = window.request.blocks
    before = slots_of(blocks, 0, run.start, block_tokens)
    return np.concatenate([before, slots_of(blocks, run.stop, window.end, block_tokens)])


def _in_cache(window: Window, run: slice, block_tokens: int) -> slice:
    """The slots of a run of tokens that stand in neighbouring blocks."""
    first = window.request.blocks[run.start // block_tokens] * block_tokens
    return slice(first, first + run.stop - run.start)


def _slots(cache: KVCache, window: Window) -> Slots:
    """The slots of a window's sequence from its first token to the window's end."""
    blocks = window.request.blocks[: -(-window.end // cache.block_tokens)]
    first = blocks[0]
    if blocks == list(range(first, first + len(blocks))):
        return slice(first * cache.block_tokens, first * cache.block_tokens + window.end)
    slots = slots_of(blocks, 0, window.end, cache.block_tokens)
    return torch.from_numpy(slots).to(cache.keys[0].device)[None]


def _additive(seen: Tensor, like: Tensor) -> Tensor:
    """0 where `seen`, elsewhere what leaves nothing: made once a step, where SDPA would convert a boolean mask a layer.

    Not −inf: a row that sees nothing has a finite sum of exponentials then, and no share beside what is read in place.
    """
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(
        ~seen, torch.finfo(like.dtype).min
    )


AttentionInterface.register(ATTENTION, paged_attention)
