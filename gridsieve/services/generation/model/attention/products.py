"""Causal attention of a chunk in bfloat16 by products of some rows with all keys that they see, on CPUs where that is
faster than SDPA.

    rows of a chunk:  [ 64 rows | 64 rows | … ]
    scores            float32 [query heads, rows, keys seen], then their softmax, rounded to bfloat16 as by SDPA
    values            multiplied in bfloat16, which oneDNN does in hardware

SDPA multiplies by MKL, which has no kernel for bfloat16 on processors of AMD. The difference from exact attention is
that of SDPA.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

# Of one product. Fewer rows if their scores would be more.
MAX_ROWS = 64
MAX_SCORES = 2**24
# With fewer keys, starting the products takes longer than they save.
MIN_CONTEXT = 64


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
    shared, start = heads // kv_heads, context - count
    out = query.new_empty(count, kv_heads, shared, head_dim)
    query = query.float().unflatten(0, (kv_heads, -1))  # query heads that share a KV head are rows of it
    keys = key.float().transpose(1, 2)
    step = max(1, min(count, MAX_ROWS, MAX_SCORES // (heads * context)))
    buffers = query.new_empty(2, heads * step * context)
    rounded = value.new_empty(heads * step * context)
    later = torch.full((step, step), torch.finfo(query.dtype).min).triu_(1)
    for first in range(0, count, step):
        rows = min(step, count - first)
        seen = start + first + rows
        scores, shares, weights = (
            each[: heads * rows * seen].view(kv_heads, shared * rows, seen) for each in (*buffers, rounded)
        )
        asking = query[:, :, first : first + rows].flatten(1, 2)
        torch.baddbmm(scores, asking, keys[:, :, :seen], beta=0, alpha=scaling, out=scores)
        scores.unflatten(1, (shared, rows))[..., start + first :] += later[:rows, :rows]
        torch.softmax(scores, -1, out=shares)
        attended = torch.bmm(weights.copy_(shares), value[:, :seen])
        out[first : first + rows] = attended.unflatten(1, (shared, rows)).permute(2, 0, 1, 3)
    return out.flatten(1, 2)
