"""Attention over the paged cache is softmax(q kᵀ) v over each row's own sequence, wherever its blocks stand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from services.generation import attention
from services.generation.attention import KVCache, make_batch, paged_attention
from services.generation.request import Request
from services.generation.windows import Packed, Window, slots_of

BLOCK_TOKENS, BLOCKS = 4, 24
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[list[int], int, int]]:
    """Blocks, computed tokens and window's end of each sequence; single tokens first, as they are packed."""
    shift = draw(st.integers(0, BLOCKS - 1))
    neighbours = [*range(shift, BLOCKS), *range(shift)]
    free = draw(st.sampled_from([neighbours, draw(st.permutations(range(BLOCKS)))]))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        end = draw(st.integers(1, 4 * BLOCK_TOKENS))
        start = draw(st.sampled_from([end - 1, draw(st.integers(0, end - 1))]))
        count = -(-end // BLOCK_TOKENS)
        found.append((free[:count], start, end))
        free = free[count:]
    return sorted(found, key=lambda each: each[2] - each[1] > 1)


def by_formula(query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
    """query [rows, heads, D], key and value [end, kv_heads, D]; row r sees tokens up to start + r."""
    key, value = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (key, value))
    scores = torch.einsum("rhd,chd->hrc", query, key) * 0.3
    seen = torch.arange(key.shape[0]) <= start + torch.arange(query.shape[0])[:, None]
    return torch.einsum("hrc,chd->rhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


@pytest.mark.parametrize("in_place_tokens", [1, 6, 100])
@settings(max_examples=40, deadline=None)
@given(batch=batches(), seed=st.integers(0, 2**16))
def test_every_row_sees_its_own_sequence_and_nothing_else(
    in_place_tokens: int, batch: list[tuple[list[int], int, int]], seed: int
) -> None:
    with patch.object(attention, "IN_PLACE_TOKENS", in_place_tokens):
        check(batch, seed)


def check(batch: list[tuple[list[int], int, int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache(2, BLOCKS, BLOCK_TOKENS, KV_HEADS, HEAD_DIM, torch.zeros(()))
    for layer in (*cache.keys, *cache.values):
        layer.fill_(torch.nan)  # whatever stands in slots of others
    windows, slots, queries, keys, values, expected = [], [], [], [], [], []
    for blocks, start, end in batch:
        key, value = torch.randn(2, end, KV_HEADS, HEAD_DIM, generator=generator)
        query = torch.randn(end - start, HEADS, HEAD_DIM, generator=generator)
        before = torch.from_numpy(slots_of(blocks, 0, start, BLOCK_TOKENS))
        cache.keys[1][:, before] = key[:start].transpose(0, 1)
        cache.values[1][:, before] = value[:start].transpose(0, 1)
        windows.append(Window(cast(Request, SimpleNamespace(blocks=blocks)), start, end, True))
        slots.append(torch.from_numpy(slots_of(blocks, start, end, BLOCK_TOKENS)))
        queries.append(query)
        keys.append(key[start:])
        values.append(value[start:])
        expected.append(by_formula(query, key, value, start))
    packed = cast(
        Packed,
        SimpleNamespace(
            windows=tuple(windows),
            singles=sum(window.tokens == 1 for window in windows),
            slots=torch.cat(slots).numpy(),
        ),
    )
    query, key, value = (torch.cat(each).transpose(0, 1)[None] for each in (queries, keys, values))
    module = cast(nn.Module, SimpleNamespace(layer_idx=1))
    found, _ = paged_attention(module, query, key, value, None, batch=make_batch(cache, packed), scaling=0.3)
    torch.testing.assert_close(found[0], torch.cat(expected), atol=1e-5, rtol=1e-5)
