"""Attention kernels are tried once, at the start, against torch's own attention in float32."""

from __future__ import annotations

import torch
from torch import Tensor

# The largest difference between two correct kernels on values of about one, in bfloat16.
TOLERANCE = 2e-2


def check_result(found: Tensor, expected: Tensor) -> None:
    """Raises AssertionError if a kernel's result differs. Both: any floating-point dtype, of the same shape."""
    difference = float((found.float() - expected.float()).abs().max())
    assert difference < TOLERANCE, f"the result differs by {difference}"


def avoid_cudnn(device: torch.device) -> None:
    """Takes cuDNN out of torch's choices of attention.

    On Hopper it is the first one, but plans for up to half a second for every new size, and sizes change with every
    forward.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
