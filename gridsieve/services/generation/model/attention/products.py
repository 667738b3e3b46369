"""Causal attention of a chunk on processors that multiply bfloat16 faster than float32: the products of a few rows with
all keys that they see, then a softmax, then the products with the values.

    rows of a chunk:  [ 128 rows | 128 rows | rest ]      scores of [query heads, 128, keys seen] stay in cache

SDPA's kernel takes twice as long on such processors of AMD, where it multiplies by MKL. It keeps scores in float32;
here they are rounded to bfloat16, as by transformers' eager attention.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Maximum number of rows, and of scores, of one product. Rows are at least MIN_ROWS.
MAX_ROWS = 128
MIN_ROWS = 64
MAX_SCORES = 2**20


@cache
def beat_sdpa(device: str, dtype: torch.dtype) -> bool:
    """Whether the processor multiplies numbers of a dtype in hardware, but has no tiles (AMX), which SDPA would use."""
    multiplies = dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    return device == "cpu" and bool(multiplies) and not torch.cpu._is_amx_tile_supported()


def attend(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """query: [heads, R, head_dim], the last R tokens of a sequence. key, value: [kv_heads, C, head_dim], all of them.

    Row r sees the keys up to C − R + r. Returns [R, heads, head_dim].
    """
    (heads, count, head_dim), (kv_heads, context) = query.shape, key.shape[:2]
    query = query.unflatten(0, (kv_heads, -1))  # query heads that share a KV head are rows of it
    shared, start = heads // kv_heads, context - count
    step = min(count, max(MIN_ROWS, min(MAX_ROWS, MAX_SCORES // (heads * context))))
    buffers = query.new_empty(2, heads * step * context)
    later = torch.full((step, step), torch.finfo(query.dtype).min, dtype=query.dtype).triu_(1)
    out = query.new_empty(count, kv_heads, shared, head_dim)
    for first in range(0, count, step):
        rows = min(step, count - first)
        seen = start + first + rows
        scores, weights = (each[: heads * rows * seen].view(kv_heads, shared * rows, seen) for each in buffers)
        asking = query[:, :, first : first + rows].flatten(1, 2)
        torch.baddbmm(scores, asking, key[:, :seen].transpose(1, 2), beta=0, alpha=scaling, out=scores)
        scores.unflatten(1, (shared, rows))[..., start + first :] += later[:rows, :rows]
        torch.softmax(scores, -1, out=weights)
        attended = torch.bmm(weights, value[:, :seen])
        out[first : first + rows] = attended.unflatten(1, (shared, rows)).permute(2, 0, 1, 3)
    return out.flatten(1, 2)
