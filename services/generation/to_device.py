"""Copies from host to device that do not block the host."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array as a tensor on the device; on the CPU it shares the array's memory."""
    return tensor_to_device(torch.from_numpy(array), device)


def tensor_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device; a tensor that is already there is returned unchanged."""
    return pinned_for(tensor, device).to(device, non_blocking=True)


def pinned_for(tensor: Tensor, device: torch.device) -> Tensor:
    """A host tensor in pinned memory if the device is CUDA, else unchanged.

    CUDA blocks the host while it copies pageable memory. torch keeps pinned memory alive until its copy has finished.
    """
    if device.type != "cuda" or tensor.device.type != "cpu" or not tensor.numel():
        return tensor
    return tensor.contiguous().pin_memory()
