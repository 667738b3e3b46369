"""Kernels over paged blocks, computed plainly: as torch's variable-length function, and as FlashInfer's.

They read no number back from a device, so that capturing them is watched as a card would watch it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.generation.model.attention.flash_infer import Kernel
from services.generation.model.attention.pages import PagePlan
from services.generation.model.attention.varlen import VarlenCache
from services.generation.model.runner import Runner


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


def varlen_attn(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: None, max_q: int, max_k: int, **named: Any
) -> Tensor:
    """torch's documented function."""
    rows = torch.arange(len(query), device=query.device)
    sequence = torch.searchsorted(cu_seq_q[1:].contiguous(), rows, right=True)
    places = named["seqused_k"][sequence] - (cu_seq_q[1:][sequence] - rows)
    return attend(query, key, value, named["block_table"][sequence], places, named["scale"])


def read_in_place(runner: Runner) -> None:
    """Gives a runner whose cache gathers one that reads blocks in place, as graphs need."""
    if not runner._cache.captures:
        runner._cache = VarlenCache(runner._cache.sizes, runner.model.embed_tokens.weight, varlen_attn)


class PlainKernel(Kernel):
    """Reads the arrays of its plan as FlashInfer documents them."""

    def __init__(self, rows: int | None = None, most_pages: int | None = None) -> None:
        self._rows, self._most_pages = rows, most_pages

    def plan(self, pages: PagePlan) -> None:
        assert {array.dtype for array in (pages.row_ends, pages.page_ends, pages.pages)} == {np.dtype(np.int32)}
        assert self._rows is None or list(pages.row_ends) == list(range(self._rows + 1))
        assert self._most_pages is None or len(pages.pages) <= self._most_pages
        self._pages = pages

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        plan, block_tokens = self._pages, key.shape[1]
        key, value = key.to(query.dtype), value.to(query.dtype)
        tables, places = [], []
        most = int(np.diff(plan.page_ends).max())
        for index, last in enumerate(plan.last_page_tokens):
            pages = plan.pages[plan.page_ends[index] : plan.page_ends[index + 1]]
            rows = plan.row_ends[index + 1] - plan.row_ends[index]
            tokens = (len(pages) - 1) * block_tokens + last
            places += range(tokens - rows, tokens)
            tables += [[*pages, *[pages[0]] * (most - len(pages))]] * rows
        scale = query.shape[2] ** -0.5
        return attend(query, key, value, torch.tensor(np.array(tables)), torch.tensor(np.array(places)), scale)


class PlainKernels:
    """Implements `Kernels`."""

    def __init__(self) -> None:
        self.most_pages = 0

    def prefill(self) -> Kernel:
        return PlainKernel()

    def decode(self, rows: int, most_pages: int) -> Kernel:
        assert not self.most_pages or most_pages <= self.most_pages, "the largest must be made first"
        self.most_pages = self.most_pages or most_pages
        return PlainKernel(rows, most_pages)
