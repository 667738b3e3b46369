"""The interface of a paged KV cache. `sdpa` and `flash_infer` implement it, each with a layout of its own.

Source: PagedAttention, arXiv 2309.06180; e4m3, arXiv 2209.05433.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gridsieve.services.generation.request.batch import Context, Packed

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """blocks: those that requests may hold. Every cache has one more, for rows that pad a batch.

    fp8: keys and values are stored in e4m3 with a scale of 1, else in the model's dtype. fixed: what is computed of a
    row is the same to the last bit whatever is computed with it.
    """

    layers: int
    blocks: int
    block_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    fp8: bool = False
    fixed: bool = False

    def dtype(self, like: Tensor) -> torch.dtype:
        """Of stored keys and values; like: of the model's dtype."""
        return FP8 if self.fp8 else like.dtype

    @property
    def padding_block(self) -> int:
        return self.blocks


def write(layer: Tensor, dim: int, slots: Tensor, rows: Tensor) -> None:
    """Writes rows to their slots of a layer's keys or values, along `dim`. In e4m3, values beyond ±448 saturate.

    slots: int64 [T].
    """
    if layer.dtype == FP8:
        most = torch.finfo(FP8).max
        # torch copies e4m3 by index on few devices, and bytes on all.
        layer, rows = layer.view(torch.uint8), rows.clamp(-most, most).to(FP8).view(torch.uint8)
    layer.index_copy_(dim, slots, rows)


class Batch(Protocol):
    """The metadata that attention needs for one packed forward of T rows, made once for all layers."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Writes the new keys and values, then attends every row to its own sequence, up to itself.

        query: [heads, T, head_dim]; key, value: [kv_heads, T, head_dim]. Returns [T, heads, head_dim].
        """


class PagedCache(Protocol):
    """Keys and values of every layer."""

    sizes: CacheSizes

    def batch(self, packed: Packed) -> Batch:
        """For the chunks of a step."""

    def read_keys(self, layer: int, slots: Tensor) -> Tensor:
        """Keys of one sequence as attention reads them: [kv_heads, N, head_dim], in a dtype of floats.

        slots: int64 [N], on the device.
        """

    def ahead(self, contexts: Sequence[Context], count: int) -> Batch | None:
        """For `count` forwards after one another of a cache of one layer, of the next row of each sequence each.

        contexts: of the first rows, which are written nowhere but in this batch. None if they must be in the cache.
        """

    @property
    def captures(self) -> bool:
        """Whether its attention reads blocks in place, so that decode batches can be captured in graphs."""


class CapturedCache(PagedCache, Protocol):
    """A cache whose decode batches graphs can capture."""

    def plan_decode(self, contexts: Sequence[Context], max_blocks: int, most_rows: int = 1) -> None:
        """Called on the host each time before a decode batch of these sequences is computed, captured or replayed.

        max_blocks: of one sequence. most_rows: of one sequence; 1: each has one row, else a row and its drafts. The
        first call is for the largest number of rows.
        """

    def decode_batch(self, table: Tensor, lengths: Tensor, most_rows: int = 1) -> Batch:
        """For R rows of the sequences that were planned with as many rows and `most_rows`.

        table: int32 [R, W], the block table of each row's sequence; entries past its last block may be any block of the
        cache. lengths: int32 [R], tokens of the sequence up to the row, the row included, at most W · block_tokens.
        Both are on the device and never read by the host, so that a graph can capture what this does.
        """
