"""Attention over the paged cache, as transformers calls it: once per layer, for the whole packed batch.

`flash_infer` reads the cache's blocks in place, on CUDA with the extra `cuda`; `sdpa` gathers them, on every device, as
does `fixed_sdpa`, whose results have the same bits whatever is computed together.
Source: `transformers.AttentionInterface`.
"""

from __future__ import annotations

import importlib.util

import structlog
import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from gridsieve.services.compute.kernels import avoid_cudnn
from gridsieve.services.generation.model.attention.cache import Batch, CacheSizes, PagedCache
from gridsieve.services.generation.model.attention.fixed_sdpa import FixedSdpaCache
from gridsieve.services.generation.model.attention.flash_infer import FlashInferCache, find_kernels, lacking
from gridsieve.services.generation.model.attention.running import RUNNING
from gridsieve.services.generation.model.attention.sdpa import SdpaCache

ATTENTION = "gridsieve_paged"

log = structlog.get_logger()


def make_cache(sizes: CacheSizes, like: Tensor) -> PagedCache:
    """The fastest cache for the device and dtype of `like`."""
    avoid_cudnn(like.device)
    if kernels := find_kernels(sizes, like):
        log.info("attention", cache="flash_infer", device=str(like.device))
        return FlashInferCache(sizes, like, kernels)
    if like.device.type == "cuda":
        why = _reason(sizes, like)
        log.warning(
            f"attention copies whole contexts in every step, and decode steps run without graphs: {why}",
            device=str(like.device),
            dtype=str(like.dtype),
        )
    else:
        log.info("attention", cache="sdpa", device=str(like.device))
    return FixedSdpaCache(sizes, like) if sizes.fixed else SdpaCache(sizes, like)


def _reason(sizes: CacheSizes, like: Tensor) -> str:
    """Why there is no kernel that reads blocks in place, and what helps if anything does."""
    if why := lacking(sizes.head_dim, like):
        return why
    if importlib.util.find_spec("flashinfer") is None:
        return "install FlashInfer, pip install gridsieve[cuda]"
    return "see why FlashInfer does not work above"


def paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, heads, T, head_dim]
    key: Tensor,  # [1, kv_heads, T, head_dim]
    value: Tensor,  # [1, kv_heads, T, head_dim]
    attention_mask: None,
    *,
    scaling: float,
    batch: Batch | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers. Returns [1, T, heads, head_dim]."""
    layer = module.layer_idx
    assert isinstance(layer, int)
    if batch is None:
        return torch.ops.gridsieve.paged_attention(query, key, value, layer, scaling), None
    return batch.attend(layer, query[0], key[0], value[0], scaling)[None], None


def _attend(query: Tensor, key: Tensor, value: Tensor, layer: int, scaling: float) -> Tensor:
    return RUNNING.batch.attend(layer, query[0], key[0], value[0], scaling)[None]


# An operator of its own is opaque to the compiler.
_library = torch.library.Library("gridsieve", "FRAGMENT")
_library.define("paged_attention(Tensor query, Tensor key, Tensor value, int layer, float scaling) -> Tensor")
_library.impl("paged_attention", _attend, "CPU")
_library.impl(
    "paged_attention", lambda query, key, value, layer, scaling: query.new_empty(query.transpose(1, 2).shape), "Meta"
)
AttentionInterface.register(ATTENTION, paged_attention)
