"""Which models can be captured in CUDA graphs."""

from __future__ import annotations

import torch


def can_capture(family: str, dtype: torch.dtype) -> bool:
    """Experts are computed by torch's grouped matrix product, which synchronises in every type but bfloat16."""
    return "moe" not in family or dtype is torch.bfloat16
