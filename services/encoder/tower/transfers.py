"""Copies between host and device that do not make the host wait.

    tower's stream   [ forward ][ prune ]·[ next forward          ]
    copy stream                          [ copy ]· `wait` returns

On CUDA they go through pinned memory, and only the caller of `Readback.wait` blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor to the device; from host to CUDA through pinned memory, without waiting."""
    return pin(tensor, device).to(device, non_blocking=True)


def pin(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor from which copying to the device does not block: pinned if it goes from host to CUDA."""
    return tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor


class Readback:
    """Copies tensors to the host, in the state in which the current stream leaves them; on the CPU, no copy."""

    def __init__(self, *tensors: Tensor) -> None:
        """Starts copying. The tensors must not be written to before `wait` has returned."""
        self._sources, self._copies, self._done = tensors, list(tensors), None
        device = tensors[0].device
        if device.type == "cuda":
            self._copies, self._done = _start(tensors, device)

    def wait(self) -> list[Tensor]:
        """The tensors on the host, in their order, once they are copied."""
        if self._done is not None:
            self._done.synchronize()
        self._sources = ()  # kept until now: the copy stream read their memory
        return self._copies


def _start(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[list[Tensor], torch.cuda.Event]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        for copy, each in zip(copies, tensors, strict=True):
            copy.copy_(each, non_blocking=True)
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
    return copies, done
