"""Which models' steps a graph can hold."""

from __future__ import annotations

import torch


def can_capture(family: str, dtype: torch.dtype) -> bool:
    """torch's grouped product, by which experts are computed, asks the host in any type but bfloat16."""
    return "moe" not in family or dtype is torch.bfloat16
