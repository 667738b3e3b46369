"""Attention over the paged cache is softmax(q kᵀ) v over each row's own sequence, wherever its blocks are."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor, nn

from gridsieve.services.generation.model.attention import PagedCache, make_cache, paged_attention, products, sdpa
from gridsieve.services.generation.model.attention.cache import CacheSizes
from gridsieve.services.generation.model.attention.flash_infer import (
    FlashInferCache,
    FlashInferKernels,
    verifying_bytes,
    workspace_bytes,
)
from gridsieve.services.generation.model.attention.sdpa import SdpaCache
from gridsieve.services.generation.request.batch import Context, Packed, slots_of
from tests.generation.paged_kernels import FakeFlashInfer, Kernels, PlainKernel

BLOCK_TOKENS, BLOCKS = 4, 24
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = HEAD_DIM**-0.5
SIZES = CacheSizes(2, BLOCKS, BLOCK_TOKENS, HEADS, KV_HEADS, HEAD_DIM)
IN_FP8 = replace(SIZES, fp8=True)


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[list[int], int, int]]:
    """Blocks, computed tokens and chunk's end of each sequence, in packed order: single-token chunks first."""
    shift = draw(st.integers(1, BLOCKS - 1))
    neighbours = [*range(shift, BLOCKS), *range(1, shift)]  # block 0 is never theirs, so padding must not read it
    free = draw(st.sampled_from([neighbours, draw(st.permutations(range(1, BLOCKS)))]))
    found = []
    for _ in range(draw(st.integers(1, 5))):
        end = draw(st.integers(1, 4 * BLOCK_TOKENS))
        start = draw(st.sampled_from([end - 1, draw(st.integers(0, end - 1))]))
        count = -(-end // BLOCK_TOKENS)
        found.append((free[:count], start, end))
        free = free[count:]
    return sorted(found, key=lambda each: each[2] - each[1] > 1)


def by_formula(query: Tensor, key: Tensor, value: Tensor, start: int, scale: float = SCALE) -> Tensor:
    """query [rows, heads, D], key and value [end, kv_heads, D]; row r sees tokens up to start + r."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = torch.einsum("rhd,chd->hrc", query, key) * scale
    seen = torch.arange(key.shape[0]) <= start + torch.arange(query.shape[0])[:, None]
    return torch.einsum("hrc,chd->rhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), value)


@settings(max_examples=60)
@given(
    batch=batches(),
    seed=st.integers(0, 2**16),
    gathered=st.sampled_from([1, 20, 65536]),
    in_place_tokens=st.sampled_from([1, 6, 100]),
    repeating=st.sampled_from([(), (), ("cpu",)]),
    by_products=st.booleans(),
    scores=st.sampled_from([1, 100, 65536]),
)
def test_every_row_sees_its_own_sequence_and_nothing_else(
    batch: list[tuple[list[int], int, int]],
    seed: int,
    gathered: int,
    in_place_tokens: int,
    repeating: tuple[str, ...],
    by_products: bool,
    scores: int,
) -> None:
    """repeating: devices without kernels for grouped heads. by_products: of long chunks, at most three rows each.
    scores: of one product, at most."""

    def attend(*arrays: Tensor, **named: Any) -> Tensor:
        assert not (repeating and named.get("enable_gqa") and named.get("attn_mask") is not None)
        return plain(*arrays, **named)

    plain = sdpa.F.scaled_dot_product_attention
    with (
        patch.object(sdpa, "IN_PLACE_TOKENS", in_place_tokens),
        patch.object(sdpa, "MAX_GATHERED_TOKENS", gathered),
        patch.object(sdpa, "REPEATING_DEVICES", repeating),
        patch.object(sdpa.F, "scaled_dot_product_attention", attend),
        patch.object(sdpa, "SHORT_TOKENS", 4 if by_products else 16),
        patch.object(products, "MAX_ROWS", 3),
        patch.object(products, "MAX_SCORES", scores),
        patch.object(products, "MIN_CONTEXT", 1),
        patch.object(products, "beat_sdpa", lambda device, dtype: by_products),
    ):
        check(SdpaCache(SIZES, torch.zeros(())), batch, seed)


def test_products_are_as_near_to_exact_attention_as_sdpa() -> None:
    """Scores reach 60, and have a part that is the same for all keys, as those of models with a bias of keys."""
    torch.manual_seed(0)
    query, key, value = torch.randn(8, 100, 64), 10 * torch.randn(2, 300, 64) + 10, torch.randn(2, 300, 64)
    query, key, value = (each.bfloat16() for each in (query, key, value))
    exact = by_formula(*(each.double().transpose(0, 1) for each in (query, key, value)), 200, 0.125)
    masked = sdpa.F.scaled_dot_product_attention(
        query[None], key[None], value[None], torch.ones(100, 300, dtype=torch.bool).tril(200), enable_gqa=True
    )

    def error(found: Tensor) -> float:
        return float((found - exact).pow(2).mean().sqrt())

    assert error(products.attend(query, key, value, 0.125)) < 1.5 * error(masked[0].transpose(0, 1))


def test_a_kernel_with_wrong_results_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    Kernels(SIZES, torch.zeros(()))
    Kernels(IN_FP8, torch.zeros(()))
    right = PlainKernel.run
    monkeypatch.setattr(PlainKernel, "run", lambda *arrays: right(*arrays) + 0.1)
    with pytest.raises(AssertionError, match=r"differs by 0\.1"):
        Kernels(SIZES, torch.zeros(()))


def check(cache: PagedCache, batch: list[tuple[list[int], int, int]], seed: int) -> None:
    found, expected = attended(cache, batch, seed)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def attended(
    cache: PagedCache,
    batch: list[tuple[list[int], int, int]],
    seed: int,
    change: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> tuple[Tensor, Tensor]:
    """What a cache attends to, and the formula, of random rows, whose keys and values `change` changes."""
    assert isinstance(cache, SdpaCache | FlashInferCache)
    generator = torch.Generator().manual_seed(seed)
    for layer in (*cache.keys, *cache.values):
        layer.fill_(torch.nan)  # slots of other sequences must not be read
    contexts, slots, queries, keys, values, expected = [], [], [], [], [], []
    for blocks, start, end in batch:
        key, value = change(torch.randn(2, end, KV_HEADS, HEAD_DIM, generator=generator))
        query = torch.randn(end - start, HEADS, HEAD_DIM, generator=generator)
        before = torch.from_numpy(slots_of(blocks, 0, start, BLOCK_TOKENS))
        for layer, rows in ((cache.keys[1], key), (cache.values[1], value)):
            stored = (in_e4m3(rows[:start]) if cache.sizes.fp8 else rows[:start]).to(layer.dtype)
            if isinstance(cache, SdpaCache):
                layer[:, before] = stored.transpose(0, 1)
            else:
                layer.flatten(0, 1)[before] = stored
        contexts.append(Context(start, end, blocks))
        slots.append(torch.from_numpy(slots_of(blocks, start, end, BLOCK_TOKENS)))
        queries.append(query)
        keys.append(key[start:])
        values.append(value[start:])
        expected.append(by_formula(query, key, value, start))
    singles = sum(context.tokens == 1 for context in contexts)
    packed = SimpleNamespace(contexts=tuple(contexts), num_decodes=singles, slots=torch.cat(slots).numpy())
    made = cache.batch(cast(Packed, packed))
    query, key, value = (torch.cat(each).transpose(0, 1)[None] for each in (queries, keys, values))
    module = cast(nn.Module, SimpleNamespace(layer_idx=1))
    found, _ = paged_attention(module, query, key, value, None, batch=made, scaling=SCALE)
    return found[0], torch.cat(expected)


@settings(max_examples=30)
@given(
    rows=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    lengths=st.lists(st.integers(4, 4 * BLOCK_TOKENS), min_size=4, max_size=4),
    spare=st.integers(0, 3),
    seed=st.integers(0, 2**16),
)
def test_a_captured_step_with_drafts_reads_each_context_once(
    rows: list[int], lengths: list[int], spare: int, seed: int
) -> None:
    """Of sequences of up to four rows, in a graph with rows to spare."""
    library, like, draw = FakeFlashInfer(), torch.zeros(()), torch.Generator().manual_seed(seed)
    cache = FlashInferCache(SIZES, like, Kernels(SIZES, like, library))
    for layer in (*cache.keys, *cache.values):
        layer.fill_(torch.nan)  # slots of other sequences must not be read
    contexts, expected, new = list[Context](), list[Tensor](), list[list[Tensor]]()
    for number, (count, end) in enumerate(zip(rows, lengths, strict=False)):
        blocks, start = [*range(4 * number + 1, 4 * number + 5)][::-1], end - count
        query = torch.randn(count, HEADS, HEAD_DIM, generator=draw)
        key, value = torch.randn(2, end, KV_HEADS, HEAD_DIM, generator=draw)
        before = torch.from_numpy(slots_of(blocks, 0, start, BLOCK_TOKENS))
        for layer, each in ((cache.keys[1], key), (cache.values[1], value)):
            layer.flatten(0, 1)[before] = each[:start]
        contexts.append(Context(start, end, blocks))
        new.append([query, key[start:], value[start:]])
        expected.append(by_formula(query, key, value, start))
    new.append([torch.randn(spare, each, HEAD_DIM, generator=draw) for each in (HEADS, KV_HEADS, KV_HEADS)])
    padding = [Context(0, 1, (SIZES.padding_block,))] * spare
    table = torch.full((sum(rows) + spare, 4), SIZES.padding_block, dtype=torch.int32)
    ends = torch.ones(len(table), dtype=torch.int32)
    at = 0
    for context in contexts:
        table[at : at + context.tokens] = torch.tensor(context.blocks)
        ends[at : at + context.tokens] = torch.arange(context.start + 1, context.end + 1)
        at += context.tokens
    query, key, value = (torch.cat(each).transpose(0, 1) for each in zip(*new, strict=True))
    for _ in range(2):  # a kernel is made by the first plan, and keeps its buffers
        cache.plan_decode([*contexts, *padding], 4, 4)
        found = cache.decode_batch(table, ends, 4).attend(1, query, key, value, SCALE)
        torch.testing.assert_close(found[:at], torch.cat(expected), atol=1e-5, rtol=1e-5)
        assert library.made[-1].blocks_read == sum(-(-each.end // BLOCK_TOKENS) for each in contexts) + spare


def e4m3_numbers() -> Tensor:
    """The numbers of e4m3 that are not negative, by their codes: 4 bits of exponent, of bias 7, and 3 of mantissa."""
    codes = [divmod(code, 8) for code in range(127)]  # the last is NaN
    return torch.tensor(
        [(1 + bits / 8) * 2.0 ** (exponent - 7) if exponent else bits / 8 * 2.0**-6 for exponent, bits in codes]
    )


def in_e4m3(rows: Tensor) -> Tensor:
    """Each number's nearest in e4m3, of two the one with an even code; beyond the largest, the largest."""
    numbers, sizes = e4m3_numbers(), rows.abs().clamp(max=448)
    above = torch.searchsorted(numbers, sizes.contiguous())
    below = (above - 1).clamp(min=0)
    up, down = numbers[above] - sizes, sizes - numbers[below]
    nearest = torch.where((up < down) | ((up == down) & (above % 2 == 0)), numbers[above], numbers[below])
    return nearest.copysign(rows)


@pytest.mark.parametrize("name", ["sdpa", "flash_infer"])
@settings(max_examples=30)
@given(
    batch=batches(),
    seed=st.integers(0, 2**16),
    spread=st.sampled_from([0.01, 1, 300]),
    in_place_tokens=st.sampled_from([1, 100]),
)
def test_a_cache_in_fp8_attends_to_rounded_keys_and_values_to_the_bit(
    name: str, batch: list[tuple[list[int], int, int]], seed: int, spread: float, in_place_tokens: int
) -> None:
    def cache(sizes: CacheSizes) -> PagedCache:
        like = torch.zeros(())
        return SdpaCache(sizes, like) if name == "sdpa" else FlashInferCache(sizes, like, Kernels(sizes, like))

    with patch.object(sdpa, "IN_PLACE_TOKENS", in_place_tokens):
        found, _ = attended(cache(IN_FP8), batch, seed, change=lambda rows: spread * rows)
        expected, _ = attended(cache(SIZES), batch, seed, change=lambda rows: in_e4m3(spread * rows))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("sizes", "stored"), [(SIZES, torch.bfloat16), (IN_FP8, torch.float8_e4m3fn)])
def test_flash_infer_is_planned_with_the_dtype_of_the_cache(sizes: CacheSizes, stored: torch.dtype) -> None:
    library, like = FakeFlashInfer(), torch.zeros((), dtype=torch.bfloat16)
    cache = FlashInferCache(sizes, like, Kernels(sizes, like, library))
    assert [each.dtypes for each in library.made[:2]] == [(like.dtype, stored)] * 2
    assert cache.keys[0].dtype == stored


def test_a_step_waits_for_the_copies_of_the_step_before_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same kernel, whose pinned memory it writes again; steps take two kernels by turns."""
    done: list[str] = []

    def event() -> Mock:
        number = sum(each.startswith("made") for each in done)
        done.append(f"made {number}")
        waiting, copying = (lambda what=what: done.append(f"{what} {number}") for what in ("wait", "copied"))
        return Mock(synchronize=waiting, record=copying)

    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(PlainKernel, "plan", lambda *_: done.append("plan"))
    kernels = FlashInferKernels(FakeFlashInfer(), SIZES, torch.zeros(()), num_multiprocessors=1)
    cache = FlashInferCache(SIZES, torch.zeros(()), kernels)
    for _ in range(3):
        cache.batch(cast(Packed, SimpleNamespace(contexts=[Context(0, 1, (0,))], slots=np.array([0]))))
    first, second = (["wait 0", "plan", "copied 0"], ["wait 1", "plan", "copied 1"])
    assert done == ["made 0", "made 1", *first, *second, *first]


@given(
    st.integers(1, 16),
    st.sampled_from([1, 2, 4, 7, 8]),
    st.sampled_from([64, 128, 256]),
    st.integers(2, 512),
    st.integers(2, 17),
)
def test_the_workspace_holds_the_parts_of_rows_with_drafts(
    kv_heads: int, shared: int, head_dim: int, rows: int, most_rows: int
) -> None:
    """As FlashInfer plans graphs: tiles for the longest sequence, one of them not full for each other sequence."""
    longest = most_rows * shared
    tile = 128 if longest > 64 and head_dim < 256 else 64 if longest > 16 else 16
    tiles = max(math.ceil((rows + most_rows - 1) * shared / tile) + rows - 1, 264 // kv_heads)
    needed = kv_heads * shared * math.ceil(tiles * tile / shared) * (head_dim + 1) * 4
    sizes = CacheSizes(1, 1, 16, kv_heads * shared, kv_heads, head_dim)
    assert verifying_bytes(sizes, rows, most_rows, 132) >= needed


@given(st.integers(1, 16), st.integers(1, 16), st.sampled_from([64, 128, 256]), st.integers(1, 300))
def test_the_workspace_holds_the_results_of_split_contexts(
    kv_heads: int, shared: int, head_dim: int, num_multiprocessors: int
) -> None:
    sizes = CacheSizes(1, 1, 16, kv_heads * shared, kv_heads, head_dim)
    tiles = 2 * num_multiprocessors / kv_heads  # of 128 rows; float32 values and one float32 sum for each row
    needed = kv_heads * shared * tiles * 128 * (head_dim + 1) * 4
    assert workspace_bytes(sizes, num_multiprocessors) >= max(needed, 128 * 2**20)


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim", "capability", "said"),
    [
        (torch.float32, 8, 2, 128, (9, 0), "no kernel computes in float32, set --dtype bfloat16"),
        (torch.bfloat16, 8, 2, 80, (9, 0), "FlashInfer has kernels for heads of 64, 128, 256, this model's have 80"),
        (torch.float16, 8, 2, 64, (7, 5), "FlashInfer is used from compute capability 8.0 on, this device has 7.5"),
        *((torch.bfloat16, 2 * group, 2, size, (8, 6), None) for group, size in ((1, 64), (3, 256), (5, 128))),
    ],
)
def test_what_flash_infer_has_no_kernels_for_is_refused_before_it_compiles(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, capability: tuple[int, int], said: str | None
) -> None:
    on_cuda = SimpleNamespace(device=torch.device("cuda", 0), dtype=dtype, new_zeros=torch.zeros(()).new_zeros)
    with (
        patch.object(torch.cuda, "get_device_capability", return_value=capability),
        patch.object(torch.cuda, "get_device_properties"),
        patch.object(importlib.util, "find_spec"),
        patch.object(importlib, "import_module", side_effect=ImportError("nvcc")) as imported,
        capture_logs() as logs,
    ):
        make_cache(CacheSizes(1, 4, 16, heads, kv_heads, head_dim), cast(Tensor, on_cuda))
    warning = [each["event"] for each in logs if each["log_level"] == "warning"][-1]
    assert warning.endswith(said or "see why FlashInfer does not work above")
    assert bool(imported.call_count) == (said is None)


def test_cudnn_attention_is_turned_off_on_cuda() -> None:
    """It would plan for up to half a second for every new context length."""
    on_cuda = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32, new_zeros=torch.zeros(()).new_zeros)
    with patch.object(torch.backends.cuda, "enable_cudnn_sdp") as enable, capture_logs() as logs:
        make_cache(SIZES, cast(Tensor, on_cuda))
    enable.assert_called_once_with(False)
    (warning,) = [each["event"] for each in logs if each["log_level"] == "warning"]
    assert warning.endswith("no kernel computes in float32, set --dtype bfloat16")
