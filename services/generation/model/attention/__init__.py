"""Attention over the paged cache, as transformers calls it: once per layer, for the whole packed batch.

`sdpa` runs on every device, `varlen` where torch has a kernel that reads paged blocks directly.
Source: `transformers.AttentionInterface`.
"""

from __future__ import annotations

import structlog
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from services.generation.model.attention.cache import Batch, CacheSizes, PagedCache
from services.generation.model.attention.sdpa import SdpaCache
from services.generation.model.attention.varlen import VarlenCache, find_kernel

ATTENTION = "framesieve_paged"

log = structlog.get_logger()


def make_cache(sizes: CacheSizes, like: Tensor) -> PagedCache:
    """The fastest cache for the device and dtype of `like`."""
    if like.device.type == "cuda":
        # torch prefers cuDNN on Hopper, which spends up to half a second on a plan for every new context length, and
        # the lengths change with every step.
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
    """The attention function registered with transformers. Returns [1, T, heads, head_dim]."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    return batch.attend(layer, query[0], key[0], value[0], scaling)[None], None


AttentionInterface.register(ATTENTION, paged_attention)
