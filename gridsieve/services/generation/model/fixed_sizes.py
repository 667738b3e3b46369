"""Work on rows a fixed number at a time: a product's kernel, and so the order of its sums, follows from the number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from gridsieve.services.generation.request.division import divided, padded_size


def in_fixed_sizes(work: Callable[[Tensor], Tensor], rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """What `work` makes of rows [N, D], which it always gets in one of `sizes`, filled up with zeros."""
    counts = list(divided(len(rows), sizes))
    if not counts:
        return work(rows)
    parts = [
        work(F.pad(part, (0, 0, 0, padded_size(len(part), sizes) - len(part))))[: len(part)]
        for part in rows.split(counts)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
