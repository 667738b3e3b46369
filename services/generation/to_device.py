"""Copies between host and device that do not block the host."""

from __future__ import annotations

from collections.abc import Sequence
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


class ToHost:
    """Copies of tensors on the host, made behind what the device computes now. On the CPU they are the tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        """tensors: all on one device."""
        self._copied: torch.cuda.Event | None = None
        self._copies = tuple(tensors)
        if tensors and tensors[0].is_cuda:
            self._copies = tuple(torch.empty_like(each, device="cpu", pin_memory=True) for each in tensors)
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> tuple[Tensor, ...]:
        """The copies, once the device has computed them."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._copies
