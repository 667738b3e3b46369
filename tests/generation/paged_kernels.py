"""Attention over paged blocks, computed plainly: by a cache that needs no kernel, and as FlashInfer's kernels.

They read no number back from a device, so that capturing them is watched as a card would watch it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from gridsieve.services.compute.transfers import to_device
from gridsieve.services.generation.model import fused_layers
from gridsieve.services.generation.model.attention.block_plan import BlockPlan, last_slots
from gridsieve.services.generation.model.attention.cache import CacheSizes, write
from gridsieve.services.generation.model.attention.flash_infer import (
    FlashInferCache,
    FlashInferKernels,
    Kernel,
    check_kernels,
)
from gridsieve.services.generation.model.drafting import Drafter
from gridsieve.services.generation.model.runner import Runner
from gridsieve.services.generation.request.batch import Context, Packed
from tests.tiny import TinyEngine


def attend(query: Tensor, key: Tensor, value: Tensor, table: Tensor, places: Tensor, scale: float) -> Tensor:
    """Attention of rows, (T, heads, D), each to the tokens up to its own place of the sequence in its row of a table.

    key, value: (blocks, block_tokens, kv_heads, D). table: (T, W). places: (T,).
    """
    keys, values = (each[table.long()].flatten(1, 2) for each in (key, value))
    keys, values = (each.repeat_interleave(query.shape[1] // key.shape[2], dim=2) for each in (keys, values))
    seen = (torch.arange(keys.shape[1], device=key.device) <= places[:, None])[:, :, None]
    # Slots that must not be read may hold NaN, which a weight of zero would not remove.
    keys, values = (torch.where(seen[..., None], each, 0.0) for each in (keys, values))
    scores = torch.einsum("rhd,rchd->rch", query, keys) * scale
    weights = scores.masked_fill(~seen, -torch.inf).softmax(1)
    return torch.einsum("rch,rchd->rhd", weights, values)


class InPlaceCache:
    """A cache that reads blocks in place, on any device and in any dtype."""

    captures = True

    def __init__(self, sizes: CacheSizes, like: Tensor) -> None:
        self.sizes = sizes
        shape = (2, sizes.layers, sizes.blocks + 1, sizes.block_tokens, sizes.kv_heads, sizes.head_dim)
        self.keys, self.values = like.new_zeros(shape)

    def read_keys(self, layer: int, slots: Tensor) -> Tensor:
        return self.keys[layer].flatten(0, 1)[slots].transpose(0, 1)

    def ahead(self, contexts: Sequence[Context], count: int) -> None:
        pass

    def batch(self, packed: Packed) -> InPlaceBatch:
        contexts, device = packed.row_contexts, self.keys.device
        table = np.zeros((len(contexts), max(len(each.blocks) for each in contexts)), np.int32)
        for row, each in zip(table, contexts, strict=True):
            row[: len(each.blocks)] = each.blocks
        places = np.array([each.end - 1 for each in contexts])
        return InPlaceBatch(self, *(to_device(each, device) for each in (packed.slots, table, places)))

    def plan_decode(self, contexts: Sequence[Context], max_blocks: int, most_rows: int = 1) -> None:
        pass

    def decode_batch(self, table: Tensor, lengths: Tensor, most_rows: int = 1) -> InPlaceBatch:
        return InPlaceBatch(self, last_slots(table, lengths, self.sizes.block_tokens), table, lengths - 1)


@dataclass(frozen=True)
class InPlaceBatch:
    cache: InPlaceCache
    new_slots: Tensor
    table: Tensor
    places: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        write(keys.flatten(0, 1), 0, self.new_slots, key.transpose(0, 1))
        write(values.flatten(0, 1), 0, self.new_slots, value.transpose(0, 1))
        return attend(query.transpose(0, 1), keys, values, self.table, self.places, scaling)


def read_in_place(runner: Runner) -> None:
    """Gives a runner whose cache gathers one that reads blocks in place, as graphs need."""
    if not runner._cache.captures:
        runner._cache = InPlaceCache(runner._cache.sizes, runner.model.embed_tokens.weight)


class PlainKernel(Kernel):
    """Reads the arrays of its plan as FlashInfer documents them."""

    def plan(self, blocks: BlockPlan) -> None:
        assert {array.dtype for array in (blocks.row_ends, blocks.block_ends, blocks.blocks)} == {np.dtype(np.int32)}
        self._blocks = blocks

    @property
    def rows(self) -> int:
        return int(self._blocks.row_ends[-1])

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        plan, block_tokens = self._blocks, key.shape[1]
        key, value = key.to(query.dtype), value.to(query.dtype)
        tables: list[list[int]] = []
        places: list[int] = []
        most = int(np.diff(plan.block_ends).max())
        for index, last in enumerate(plan.last_block_tokens):
            blocks = plan.blocks[plan.block_ends[index] : plan.block_ends[index + 1]]
            rows = plan.row_ends[index + 1] - plan.row_ends[index]
            tokens = (len(blocks) - 1) * block_tokens + last
            places += range(tokens - rows, tokens)
            tables += [[*blocks, *[blocks[0]] * (most - len(blocks))]] * rows
        scale = query.shape[2] ** -0.5
        return attend(query, key, value, torch.tensor(np.array(tables)), torch.tensor(np.array(places)), scale)


class _Wrapper:
    """A wrapper of `flashinfer` with the documented arguments; computes plainly what it was planned for."""

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert (workspace.dtype, layout) == (torch.uint8, "NHD")
        self._kernel = PlainKernel()
        self.dtypes: tuple[torch.dtype, ...] = ()
        self.blocks_read = 0  # of a wrapper for graphs, by the rows of its last plan
        self.options: dict[str, bool] = {}

    def _plan(self, row_ends: Tensor, block_ends: Tensor, blocks: Tensor, last: Tensor, *dtypes: torch.dtype) -> None:
        self._kernel.plan(BlockPlan(row_ends.numpy(), block_ends.numpy(), blocks.numpy(), last.numpy()))
        self.dtypes = dtypes

    def run(self, query: Tensor, key_and_value: tuple[Tensor, Tensor]) -> Tensor:
        return self._kernel.run(query, *key_and_value)


class FakeFlashInfer:
    """Stands in for the module `flashinfer`. made: wrappers, in order. called: how often its functions were."""

    def __init__(self) -> None:
        self.made: list[_Wrapper] = []
        self.called = Counter[str]()

    def apply_rope_with_cos_sin_cache(
        self, positions: Tensor, query: Tensor, key: Tensor, head_size: int, cos_sin_cache: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As documented, in halves. query, key: (T, heads * head_size); cos_sin_cache: (positions, head_size)."""
        assert positions.dtype in (torch.int32, torch.int64)
        assert cos_sin_cache.dtype == torch.float32
        assert cos_sin_cache.is_contiguous()
        assert query.stride(1) == key.stride(1) == 1
        self.called["rope"] += 1
        turns = torch.complex(*cos_sin_cache[positions, None].double().chunk(2, dim=-1))
        turned = [
            torch.complex(*each.unflatten(1, (-1, head_size)).double().chunk(2, dim=-1)) * turns
            for each in (query, key)
        ]
        found = [torch.cat([each.real, each.imag], dim=-1).flatten(1).to(query.dtype) for each in turned]
        return found[0], found[1]

    def silu_and_mul(self, both: Tensor) -> Tensor:
        """(.., 2 * I) to (.., I), in one piece of memory, as the kernel reads it."""
        assert both.is_contiguous()
        self.called["silu"] += 1
        gate, up = both.double().chunk(2, dim=-1)
        return (gate * gate.sigmoid() * up).to(both.dtype)

    def BatchPrefillWithPagedKVCacheWrapper(
        self,
        workspace: Tensor,
        layout: str,
        *,
        backend: str,
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
    ) -> _Wrapper:
        assert backend in ("auto", "fa2")

        class Prefill(_Wrapper):
            """For graphs, the first plan has the most rows, and tiles are chosen for the longest sequence in it."""

            most_rows = 0

            def plan(
                self,
                qo_indptr: Tensor,
                paged_kv_indptr: Tensor,
                paged_kv_indices: Tensor,
                paged_kv_last_page_len: Tensor,
                num_qo_heads: int,
                num_kv_heads: int,
                head_dim_qk: int,
                page_size: int,
                *,
                causal: bool,
                q_data_type: torch.dtype,
                kv_data_type: torch.dtype,
                **options: bool,
            ) -> None:
                assert causal
                self.options = options
                places = qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
                self._plan(*places, q_data_type, kv_data_type)
                if use_cuda_graph:
                    fixed = qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf
                    room = [each.numel() for each in fixed if each is not None]
                    (*counts, blocks, last) = [each.numel() for each in places]
                    assert [*counts, last] == [*room[:2], room[3]], "a wrapper for graphs has as many sequences"
                    assert blocks <= room[2]
                    self.most_rows = self.most_rows or int(qo_indptr[-1])
                    assert qo_indptr[-1] <= self.most_rows
                    longest = self.most_rows - last + 1
                    reads = -(-qo_indptr.diff() // longest)
                    self.blocks_read = int((reads * paged_kv_indptr.diff()).sum())

            def run(self, query: Tensor, key_and_value: tuple[Tensor, Tensor]) -> Tensor:
                assert len(query) == self._kernel.rows
                return super().run(query, key_and_value)

        self.made.append(Prefill(workspace, layout))
        return self.made[-1]

    def BatchDecodeWithPagedKVCacheWrapper(
        self,
        workspace: Tensor,
        layout: str,
        *,
        use_cuda_graph: bool,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: Tensor,
        paged_kv_indices_buffer: Tensor,
        paged_kv_last_page_len_buffer: Tensor,
    ) -> _Wrapper:
        assert use_cuda_graph
        rows = paged_kv_last_page_len_buffer.numel()
        assert paged_kv_indptr_buffer.numel() == rows + 1

        class Decode(_Wrapper):
            def plan(
                self,
                indptr: Tensor,
                indices: Tensor,
                last_page_len: Tensor,
                num_qo_heads: int,
                num_kv_heads: int,
                head_dim: int,
                page_size: int,
                *,
                q_data_type: torch.dtype,
                kv_data_type: torch.dtype,
            ) -> None:
                assert last_page_len.numel() == rows, "a wrapper for graphs has a fixed number of sequences"
                assert indices.numel() <= paged_kv_indices_buffer.numel()
                row_ends = torch.arange(rows + 1, dtype=torch.int32)
                self._plan(row_ends, indptr, indices, last_page_len, q_data_type, kv_data_type)

        self.made.append(Decode(workspace, layout))
        return self.made[-1]


@contextmanager
def layers_by_flash_infer() -> Iterator[FakeFlashInfer]:
    """Models that are loaded inside use FlashInfer's functions for rotary embeddings and activations, as on CUDA."""
    library: Any = FakeFlashInfer()
    with patch.object(fused_layers, "may_work", lambda *_: True), patch.dict(sys.modules, flashinfer=library):
        yield library


class Kernels(FlashInferKernels):
    """Those that generation uses, over the module that stands in, checked at the start as there."""

    def __init__(self, sizes: CacheSizes, like: Tensor, library: FakeFlashInfer | None = None) -> None:
        super().__init__(library or FakeFlashInfer(), sizes, like, num_multiprocessors=132)
        check_kernels(self, sizes, like)

    def prefill(self) -> Kernel:
        with patch.object(torch.cuda, "Event"):
            return super().prefill()

    def decode(self, rows: int, max_blocks: int) -> Kernel:
        with patch.object(torch.cuda, "Event"):
            return super().decode(rows, max_blocks)

    def verify(self, rows: int, most_rows: int, max_blocks: int) -> Kernel:
        with patch.object(torch.cuda, "Event"):
            return super().verify(rows, most_rows, max_blocks)


def use_paged(tiny: TinyEngine) -> TinyEngine:
    """Gives an engine the cache of FlashInfer, and its head that drafts, if it has one."""
    owners: list[Runner | Drafter] = [tiny.runner]
    if tiny.runner.drafter:
        owners.append(tiny.runner.drafter)
    for owner in owners:
        sizes, like = owner._cache.sizes, tiny.model.embed_tokens.weight
        owner._cache = FlashInferCache(sizes, like, Kernels(sizes, like))
    return tiny
