"""Attention by FlashInfer, which reads the blocks of the cache in place (its pages), on cards from Ampere on.

    eager step      one plan and one kernel for all chunks, decodes among them
    decode graph    a kernel of its own for each number of rows, whose buffers stay where they are: the host plans it
                    before each replay. With drafts it is a kernel of prefill, which reads the context of a sequence
                    once for all of its rows

flashinfer 0.7.2 has kernels for the following; paths are those below flashinfer/:

    device          compute capability 8.0 on             bfloat16 on tensor cores
    queries         bfloat16, float16                     data/include/flashinfer/attention/prefill.cuh, hopper/
    keys, values    the queries' dtype; e4m3 by FA2       utils.py, is_fa3_backend_supported
    head size       64, 128, 256                          utils.py, is_fa3_prefill_head_dim_supported; FA2: prefill.cuh
                                                          reads rows in swizzled pieces of 64, utils.cuh merges the
                                                          results of split contexts (DISPATCH_HEAD_DIM)
    heads a KV head any on tensor cores, else 1, 2, 3 …   data/include/flashinfer/utils.cuh, DISPATCH_GQA_GROUP_SIZE
    page size       any

Anything else would fail only after minutes of compiling, at each start, so it is refused before FlashInfer is imported.

A plan is computed on the host, once a step, by `plan_blocks`, and copied without a wait: our arrays from pinned memory
of their own, the wrapper's from memory that it has pinned once. So each kernel waits for its own last copy before it
plans again; the kernels of eager steps take turns.
Source: FlashInfer, arXiv 2501.01005; flashinfer-python 0.7.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Protocol

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from gridsieve.services.compute.device import name_of
from gridsieve.services.compute.kernels import check_result
from gridsieve.services.compute.transfers import pinned_for, to_device
from gridsieve.services.generation.model.attention.block_plan import BlockPlan, last_slots, plan_blocks
from gridsieve.services.generation.model.attention.cache import FP8, CacheSizes, write
from gridsieve.services.generation.request.batch import Context, Packed

# As FlashInfer recommends; more where its plans of split contexts need more.
LEAST_WORKSPACE_BYTES = 128 * 2**20
_TILE_ROWS = 128
_TILES_A_MULTIPROCESSOR = 2
# From so many query heads for each KV head on, decoding is faster on tensor cores; without, 5, 7 and others would fail.
TENSOR_CORES_FROM = 4
# The table above.
LEAST_CAPABILITY = (8, 0)
DTYPES = (torch.bfloat16, torch.float16)
HEAD_DIMS = (64, 128, 256)
# Query heads of all rows that a block of FlashInfer's FA2 computes together: the first that holds a sequence, or the
# last (FA2DetermineCtaTileQ in utils.cuh; heads of 256 have no tile of 128).
TILES = (16, 64, 128)
# Kernels that plan eager steps.
TURNS = 2
# Of prefill: FlashInfer's own choice, and what runs on every card, which alone can be told not to split contexts.
BACKENDS, FIXED_BACKENDS = ("auto", "fa2"), ("fa2",)

log = structlog.get_logger()


class Kernel(Protocol):
    """Attention over blocks. scale: head_dim ** -0.5."""

    def plan(self, blocks: BlockPlan) -> None:
        """Prepares `run` for these sequences. May wait for the copies of the plan before."""

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query and result: [T, heads, head_dim]; key, value: [blocks, block_tokens, kv_heads, head_dim].

        key and value may be of another dtype, e4m3.
        """


class Kernels(Protocol):
    def prefill(self) -> Kernel:
        """For any sequences, causal: the rows of each are its last."""

    def decode(self, rows: int, max_blocks: int) -> Kernel:
        """For `rows` sequences of one row and at most so many blocks together; a graph can capture its `run`."""

    def verify(self, rows: int, most_rows: int, max_blocks: int) -> Kernel:
        """For `rows` sequences of so many rows and blocks together, as `prefill`; a graph can capture its `run`.

        most_rows: of a sequence, which has more than none; fastest up to so many.
        """


class FlashInferCache:
    """Implements `CapturedCache`. Keys and values of every layer: [blocks, block_tokens, kv_heads, head_dim] each."""

    captures = True

    def __init__(self, sizes: CacheSizes, like: Tensor, kernels: Kernels) -> None:
        self.sizes = sizes
        shape = (sizes.layers, sizes.blocks + 1, sizes.block_tokens, sizes.kv_heads, sizes.head_dim)
        self.keys = list(like.new_zeros(shape, dtype=sizes.dtype(like)).unbind())
        self.values = list(like.new_zeros(shape, dtype=sizes.dtype(like)).unbind())
        self._kernels = kernels
        self._turns = cycle([kernels.prefill() for _ in range(TURNS)])
        self._decoders: dict[tuple[int, int], Kernel] = {}  # by rows, and the most of a sequence

    def read_keys(self, layer: int, slots: Tensor) -> Tensor:
        keys = self.keys[layer].flatten(0, 1)
        stored = keys.view(torch.uint8) if keys.dtype == FP8 else keys  # bytes are indexed on all devices
        return stored[slots].view(keys.dtype).transpose(0, 1)

    def ahead(self, contexts: Sequence[Context], count: int) -> None:
        """None: it reads blocks in place."""

    def batch(self, packed: Packed) -> FlashInferBatch:
        kernel, contexts = next(self._turns), list(packed.contexts)
        if self.sizes.fixed:
            # Of one row each: the lengths of chunks would decide how many rows and keys the kernel takes at a time.
            padding = len(packed.slots) - sum(each.tokens for each in contexts)
            contexts = packed.row_contexts + [Context(0, 1, (self.sizes.padding_block,))] * padding
        kernel.plan(plan_blocks(contexts, self.sizes.block_tokens))
        return FlashInferBatch(self, to_device(packed.slots, self.keys[0].device), kernel)

    def plan_decode(self, contexts: Sequence[Context], max_blocks: int, most_rows: int = 1) -> None:
        rows = sum(each.tokens for each in contexts)
        if (rows, most_rows) not in self._decoders:
            blocks = rows * max_blocks
            self._decoders[rows, most_rows] = (
                self._kernels.decode(rows, blocks) if most_rows == 1 else self._kernels.verify(rows, most_rows, blocks)
            )
        self._decoders[rows, most_rows].plan(plan_blocks(contexts, self.sizes.block_tokens, rows))

    def decode_batch(self, table: Tensor, lengths: Tensor, most_rows: int = 1) -> FlashInferBatch:
        kernel = self._decoders[len(lengths), most_rows]
        return FlashInferBatch(self, last_slots(table, lengths, self.sizes.block_tokens), kernel)


@dataclass(frozen=True, slots=True)
class FlashInferBatch:
    """Implements `Batch`. new_slots: int64 [T]. kernel: planned for the batch."""

    cache: FlashInferCache
    new_slots: Tensor
    kernel: Kernel

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        assert math.isclose(scaling, query.shape[2] ** -0.5), "kernels are planned with the usual scale"
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        write(keys.flatten(0, 1), 0, self.new_slots, key.transpose(0, 1))
        write(values.flatten(0, 1), 0, self.new_slots, value.transpose(0, 1))
        return self.kernel.run(query.transpose(0, 1).contiguous(), keys, values)


class _Planned:
    """`Kernel` by one of FlashInfer's wrappers: for prefill, or for decoding, whose buffers stay where they are."""

    def __init__(self, wrapper: Any, sizes: CacheSizes, like: Tensor, is_prefill: bool) -> None:
        self._wrapper, self._sizes, self._like, self._is_prefill = wrapper, sizes, like, is_prefill
        self._prefill_options = {}
        if is_prefill:
            # A long context is split by what is computed together, and its parts are added up.
            self._prefill_options = {"causal": True} | ({"disable_split_kv": True} if sizes.fixed else {})
        self._copied = torch.cuda.Event()

    def plan(self, blocks: BlockPlan) -> None:
        self._copied.synchronize()
        sizes, device = self._sizes, self._like.device
        row_ends, block_ends, last_block_tokens = (
            pinned_for(torch.from_numpy(each), device)
            for each in (blocks.row_ends, blocks.block_ends, blocks.last_block_tokens)
        )
        self._wrapper.plan(
            *((row_ends,) if self._is_prefill else ()),
            block_ends,
            to_device(blocks.blocks, device),
            last_block_tokens,
            sizes.heads,
            sizes.kv_heads,
            sizes.head_dim,
            sizes.block_tokens,
            **self._prefill_options,
            q_data_type=self._like.dtype,
            kv_data_type=sizes.dtype(self._like),
        )
        self._copied.record()

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found: Tensor = self._wrapper.run(query, (key, value))
        return found


class FlashInferKernels:
    """Implements `Kernels`.

    library: the module `flashinfer`. num_multiprocessors: of the device. backend: of prefill, as FlashInfer names it.
    """

    def __init__(
        self, library: Any, sizes: CacheSizes, like: Tensor, num_multiprocessors: int, backend: str = "auto"
    ) -> None:
        self._library, self._sizes, self._like, self._backend = library, sizes, like, backend
        self._num_multiprocessors = num_multiprocessors
        self._workspace = like.new_zeros(workspace_bytes(sizes, num_multiprocessors), dtype=torch.uint8)
        self._blocks = self._integers(0)

    def prefill(self) -> Kernel:
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD", backend=self._backend)
        return _Planned(wrapper, self._sizes, self._like, is_prefill=True)

    def decode(self, rows: int, max_blocks: int) -> Kernel:
        sizes = self._sizes
        wrapper = self._library.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=sizes.heads // sizes.kv_heads >= TENSOR_CORES_FROM,
            paged_kv_indptr_buffer=self._integers(rows + 1),
            paged_kv_indices_buffer=self._shared_blocks(max_blocks),
            paged_kv_last_page_len_buffer=self._integers(rows),
        )
        return _Planned(wrapper, sizes, self._like, is_prefill=False)

    def verify(self, rows: int, most_rows: int, max_blocks: int) -> Kernel:
        """By FA2, whose kernels also decode on tensor cores."""
        sizes, needed = self._sizes, verifying_bytes(self._sizes, rows, most_rows, self._num_multiprocessors)
        if self._workspace.numel() < needed:
            self._workspace = self._like.new_zeros(needed, dtype=torch.uint8)
        wrapper = self._library.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=self._integers(rows + 1),
            paged_kv_indptr_buf=self._integers(rows + 1),
            paged_kv_indices_buf=self._shared_blocks(max_blocks),
            paged_kv_last_page_len_buf=self._integers(rows),
            backend="fa2",
        )
        kernel = _Planned(wrapper, sizes, self._like, is_prefill=True)
        # The rows of the first plan beyond one a sequence are the longest sequence for which tiles are chosen, in this
        # plan and in all that follow.
        longest = Context(0, most_rows, (0,) * -(-most_rows // sizes.block_tokens))
        kernel.plan(plan_blocks([longest, *[Context(0, 1, (0,))] * (rows - 1)], sizes.block_tokens))
        return kernel

    def _integers(self, count: int) -> Tensor:
        return self._like.new_zeros(count, dtype=torch.int32)

    def _shared_blocks(self, count: int) -> Tensor:
        """Kernels of graphs share the list of blocks of the one before, if it is long enough."""
        if self._blocks.numel() < count:
            self._blocks = self._integers(count)
        return self._blocks


def workspace_bytes(sizes: CacheSizes, num_multiprocessors: int) -> int:
    """An upper bound for a wrapper that splits long contexts of prompts.

    It holds a float32 result and a log-sum-exp of every query head, row and tile, of two tiles a multiprocessor for all
    KV heads, and room for alignment. The least covers decoding.
    """
    tiles = -(-_TILES_A_MULTIPROCESSOR * num_multiprocessors // sizes.kv_heads)
    split = sizes.heads * tiles * _TILE_ROWS * (sizes.head_dim + 1) * torch.float32.itemsize
    return max(LEAST_WORKSPACE_BYTES, split + 2**24)


def verifying_bytes(sizes: CacheSizes, rows: int, most_rows: int, num_multiprocessors: int) -> int:
    """The workspace of `Kernels.verify`, as FlashInfer plans it for a graph (PrefillPlanImpl in scheduler.cuh).

    Every sequence may have a tile that is not full.
    """
    shared = sizes.heads // sizes.kv_heads
    tile = next((each for each in TILES if each >= most_rows * shared), TILES[-1])
    tiles = -(-(rows + most_rows - 1) * shared // tile) + rows - 1
    tiles = max(tiles, _TILES_A_MULTIPROCESSOR * num_multiprocessors // sizes.kv_heads)
    split = sizes.heads * -(-tiles * tile // shared) * (sizes.head_dim + 1) * torch.float32.itemsize
    return split + 2**24


def lacking(head_dim: int, like: Tensor) -> str | None:
    """Why FlashInfer has no kernels for a model on a CUDA device; None if it has."""
    if like.dtype not in DTYPES:
        return f"no kernel computes in {name_of(like.dtype)}, set --dtype bfloat16"
    if head_dim not in HEAD_DIMS:
        return f"FlashInfer has kernels for heads of {', '.join(map(str, HEAD_DIMS))}, this model's have {head_dim}"
    capability = torch.cuda.get_device_capability(like.device)
    if capability < LEAST_CAPABILITY:
        return f"FlashInfer is used from compute capability 8.0 on, this device has {'.'.join(map(str, capability))}"
    return None


def may_work(head_dim: int, like: Tensor) -> bool:
    """Whether FlashInfer is installed and has kernels for a model on its device."""
    return (
        like.device.type == "cuda"
        and lacking(head_dim, like) is None
        and importlib.util.find_spec("flashinfer") is not None
    )


def find_kernels(sizes: CacheSizes, like: Tensor) -> Kernels | None:
    """FlashInfer's kernels, if they pass `check_kernels` on this device for this model."""
    if not may_work(sizes.head_dim, like):
        return None
    num_multiprocessors = torch.cuda.get_device_properties(like.device).multi_processor_count
    for backend in FIXED_BACKENDS if sizes.fixed else BACKENDS:
        try:
            library = importlib.import_module("flashinfer")
            kernels = FlashInferKernels(library, sizes, like, num_multiprocessors, backend)
            check_kernels(kernels, sizes, like)
        except Exception as error:  # it compiles kernels for the card, which may fail in any way
            log.warning("FlashInfer does not work here", backend=backend, error=str(error))
        else:
            return kernels
    return None


def check_kernels(kernels: Kernels, sizes: CacheSizes, like: Tensor) -> None:
    """Compares all kernels with SDPA on three blocks out of order, with NaN in all slots that they must not read.

    Raises the kernels' exceptions, and AssertionError for a wrong result.
    """
    block_tokens, device = sizes.block_tokens, like.device
    draw = torch.Generator(device).manual_seed(0)
    shape = (2, 4, block_tokens, sizes.kv_heads, sizes.head_dim)
    blocks = torch.randn(shape, generator=draw, device=device)
    table, tokens = (2, 0, 3), 3 * block_tokens - 1
    blocks[:, 1] = blocks[:, table[-1], -1] = torch.nan
    blocks = blocks.to(sizes.dtype(like))
    key, value = (each.float()[list(table)].flatten(0, 1)[:tokens].transpose(0, 1)[None] for each in blocks)
    for kernel, rows, sequences in (
        (kernels.prefill(), 2, 1),
        (kernels.decode(1, 3), 1, 1),
        (kernels.verify(2, 2, 4), 2, 2),
    ):
        query = torch.randn(rows, sizes.heads, sizes.head_dim, generator=draw, device=device).to(like.dtype)
        kernel.plan(plan_blocks([Context(tokens - rows, tokens, table)], block_tokens, sequences))
        found = kernel.run(query, *blocks.unbind())
        seen = torch.ones(rows, tokens, dtype=torch.bool, device=device).tril(tokens - rows)
        expected = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None].float(), key, value, seen, enable_gqa=sizes.heads != sizes.kv_heads
        )
        check_result(found, expected[0].transpose(0, 1))
