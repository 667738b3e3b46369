"""Attention over the paged cache, as transformers calls it: once a layer, for the whole packed batch.

It knows what a cache is asked for, and which of them suits a device. How one is laid out and read is its own: `sdpa`
runs everywhere, `varlen` where torch has a kernel that reads blocks in their places.
Sources: PagedAttention, arXiv 2309.06180; `transformers.AttentionInterface`.
"""

from __future__ import annotations

from typing import Protocol

import structlog
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from services.generation.model.attention.sdpa import SdpaCache
from services.generation.model.attention.sizes import CacheSizes
from services.generation.model.attention.varlen import VarlenCache, find_kernel
from services.generation.request.batch import Packed

ATTENTION = "framesieve_paged"

log = structlog.get_logger()


class Batch(Protocol):
    """What attention must know of one packed forward of T rows, made once for all layers."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Writes the new keys and values, then attends every row to its own sequence, up to itself.

        query: [heads, T, head_dim]; key, value: [kv_heads, T, head_dim]. Returns [T, heads, head_dim].
        """


class PagedCache(Protocol):
    """Keys and values of every layer."""

    sizes: CacheSizes

    def batch(self, packed: Packed) -> Batch:
        """The windows of a step."""

    def decode_batch(self, table: Tensor, lengths: Tensor) -> Batch:
        """One new token of each of R sequences, its keys and values where the sequence's last token stands.

        table: int32 [R, W], the blocks of each; past a sequence's last block anything within the cache may stand.
        lengths: int32 [R], tokens of each, the new one included, at most W · block_tokens.
        Both on the device, and read by operations alone: what this returns may be captured in a graph.
        """

    @property
    def gathers(self) -> bool:
        """Whether a decode batch costs as much as its whole table, however short its sequences are."""


def make_cache(sizes: CacheSizes, like: Tensor) -> PagedCache:
    """The cache that suits the device and the type of `like`."""
    if like.device.type == "cuda":
        # torch's first choice on Hopper, and it makes a plan for every new size, for up to half a second: contexts have
        # another size with every step.
        torch.backends.cuda.enable_cudnn_sdp(False)
    kernel = find_kernel(sizes, like)
    log.info("attention", cache="varlen" if kernel else "sdpa", kernel=kernel and kernel.name, device=str(like.device))
    return VarlenCache(sizes, like, kernel.attend) if kernel else SdpaCache(sizes, like)


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
    """What transformers calls. Returns [1, T, heads, head_dim]."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    return batch.attend(layer, query[0], key[0], value[0], scaling)[None], None


AttentionInterface.register(ATTENTION, paged_attention)
