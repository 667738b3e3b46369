"""Attention by torch's variable-length flash kernel, which reads the blocks of a paged cache directly.

    packed rows:  [s][s][s][   A   ][ B ]        one call per layer for all
    ends:         [0, 1, 2, 3, 3+A, 3+A+B]       cumulative row counts of the sequences
    table:        the blocks of each sequence; lengths: the tokens of each, of which the rows are the last

The function exists since torch 2.12, but torch's built-in kernel rejects block tables: FlashAttention 3 (Hopper) or 4
(Blackwell) must be installed and activated. Each is therefore tried once at startup.
Source: `torch.nn.attention.varlen`.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from framesieve.services.compute.transfers import to_device
from framesieve.services.generation.model.attention.cache import CacheSizes
from framesieve.services.generation.model.attention.pages import last_slots
from framesieve.services.generation.request.batch import Context, Packed

IMPLEMENTATIONS = ("FA3", "FA4")
# Maximum difference between two correct kernels on values of magnitude 1 in bfloat16.
TOLERANCE = 2e-2

log = structlog.get_logger()


class Attend(Protocol):
    """The arguments of `torch.nn.attention.varlen.varlen_attn` that are used here."""

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seq_q: Tensor,
        cu_seq_k: None,
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: Tensor,
        block_table: Tensor,
    ) -> Tensor:
        """query and result: [T, heads, head_dim]; key, value: [blocks, block_tokens, kv_heads, head_dim]."""


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    attend: Attend


class VarlenCache:
    """Keys and values of every layer: [blocks, block_tokens, kv_heads, head_dim] each."""

    captures = True

    def __init__(self, sizes: CacheSizes, like: Tensor, attend: Attend) -> None:
        self.sizes = sizes
        self.kernel = attend
        shape = (sizes.layers, sizes.blocks + 1, sizes.block_tokens, sizes.kv_heads, sizes.head_dim)
        self.keys = list(like.new_zeros(shape).unbind())
        self.values = list(like.new_zeros(shape).unbind())

    def batch(self, packed: Packed) -> VarlenBatch:
        """Implements `PagedCache.batch`."""
        contexts = packed.contexts
        table = np.zeros((len(contexts), max(len(each.blocks) for each in contexts)), np.int32)
        for row, each in zip(table, contexts, strict=True):
            row[: len(each.blocks)] = each.blocks
        ends = np.cumsum([0, *(each.tokens for each in contexts)], dtype=np.int32)
        lengths = np.array([each.end for each in contexts], np.int32)
        device = self.keys[0].device
        new_slots, ends_there, lengths_there, table_there = (
            to_device(array, device) for array in (packed.slots, ends, lengths, table)
        )
        most_rows = max(each.tokens for each in contexts)
        return VarlenBatch(self, new_slots, ends_there, lengths_there, table_there, most_rows, int(lengths.max()))

    def plan_decode(self, contexts: Sequence[Context], most_blocks: int) -> None:
        """Implements `CapturedCache.plan_decode`: the kernel reads all that it needs from the device."""

    def decode_batch(self, table: Tensor, lengths: Tensor) -> VarlenBatch:
        """Implements `CapturedCache.decode_batch`."""
        block_tokens = self.sizes.block_tokens
        new_slots = last_slots(table, lengths, block_tokens)
        ends = torch.arange(len(lengths) + 1, dtype=torch.int32, device=lengths.device)
        return VarlenBatch(self, new_slots, ends, lengths, table, 1, table.shape[1] * block_tokens)


@dataclass(frozen=True, slots=True)
class VarlenBatch:
    """Implements `Batch` for S sequences.

    new_slots: int64 [T]; ends: int32 [S + 1]; lengths: int32 [S]; table: int32 [S, W]; most_rows, most_tokens: maxima
    over the sequences.
    """

    cache: VarlenCache
    new_slots: Tensor
    ends: Tensor
    lengths: Tensor
    table: Tensor
    most_rows: int
    most_tokens: int

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Implements `Batch.attend`."""
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys.flatten(0, 1).index_copy_(0, self.new_slots, key.transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, self.new_slots, value.transpose(0, 1))
        return self.cache.kernel(
            query.transpose(0, 1),
            keys,
            values,
            self.ends,
            None,
            self.most_rows,
            self.most_tokens,
            scale=scaling,
            window_size=(-1, 0),  # causal, aligned to the end of each sequence
            enable_gqa=query.shape[0] != key.shape[0],
            seqused_k=self.lengths,
            block_table=self.table,
        )


def find_kernel(sizes: CacheSizes, like: Tensor) -> Kernel | None:
    """A kernel that reads paged blocks and passes `check_kernel` on this device for this model; None if none does."""
    if like.device.type != "cuda" or like.dtype not in (torch.bfloat16, torch.float16):
        return None
    if sizes.fp8:
        log.info("no paged attention", implementation="varlen", error=f"no keys in fp8 with queries in {like.dtype}")
        return None
    attention: Any = importlib.import_module("torch.nn.attention")
    try:
        varlen: Any = importlib.import_module("torch.nn.attention.varlen")
    except ImportError:
        return None
    if "block_table" not in inspect.signature(varlen.varlen_attn).parameters:
        return None
    for name in IMPLEMENTATIONS:
        try:
            attention.activate_flash_attention_impl(name)
            check_kernel(varlen.varlen_attn, sizes, like)
        except Exception as error:  # torch imports third-party packages here, which may fail in any way
            log.info("no paged attention", implementation=name, error=str(error))
            attention.restore_flash_attention_impl(_raise_warn=False)
            continue
        return Kernel(name, varlen.varlen_attn)
    return None


def check_kernel(attend: Attend, sizes: CacheSizes, like: Tensor) -> None:
    """Compares a kernel with SDPA on three blocks out of order, with NaN in all slots that it must not read.

    Raises the kernel's exceptions, and AssertionError for a wrong result.
    """
    heads, kv_heads, head_dim, block_tokens = sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.block_tokens
    draw = torch.Generator(like.device).manual_seed(0)
    blocks = torch.randn(2, 4, block_tokens, kv_heads, head_dim, generator=draw, device=like.device).to(like.dtype)
    query = torch.randn(2, heads, head_dim, generator=draw, device=like.device).to(like.dtype)
    table, tokens, scaling = [2, 0, 3], 3 * block_tokens - 1, head_dim**-0.5
    blocks[:, 1] = blocks[:, table[-1], -1] = torch.nan

    def on_device(*numbers: int) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=like.device)

    found = attend(
        query,
        blocks[0],
        blocks[1],
        on_device(0, 2),
        None,
        2,
        tokens,
        scale=scaling,
        window_size=(-1, 0),
        enable_gqa=heads != kv_heads,
        seqused_k=on_device(tokens),
        block_table=on_device(*table)[None],
    )
    key, value = (each[table].flatten(0, 1)[:tokens].transpose(0, 1)[None].float() for each in blocks)
    seen = torch.ones(2, tokens, dtype=torch.bool, device=like.device).tril(tokens - 2)
    expected = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None].float(), key, value, seen, scale=scaling, enable_gqa=heads != kv_heads
    )
    difference = float((found.float() - expected[0].transpose(0, 1)).abs().max())
    assert difference < TOLERANCE, f"the result differs by {difference}"
