"""What a step needs of the host, copied to the device while the host goes on."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array's numbers on the device; on the CPU, the array itself."""
    return tensor_to_device(torch.from_numpy(array), device)


def tensor_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """What stands on the host, on the device; what stands there is returned as it is."""
    return pinned_for(tensor, device).to(device, non_blocking=True)


def pinned_for(tensor: Tensor, device: torch.device) -> Tensor:
    """What stands on the host, in memory that is copied to the device while the host goes on.

    That is pinned memory, which torch keeps until it is copied: for any other, CUDA would have the host wait for it.
    """
    if device.type != "cuda" or tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    return tensor.contiguous().pin_memory()
