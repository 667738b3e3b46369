"""What the device has computed, brought to the host beside whatever it computes next.

    tower's stream   [ forward ][ prune ]·[ next forward          ]
    a stream beside                      [ copy ]· told to who waits

On CUDA the copies go to pinned memory, and nobody but who waits for them is held up. It knows nothing of pruning.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """Tensors on their way to the host, from the moment it is made, as the current stream will have left them."""

    def __init__(self, *tensors: Tensor) -> None:
        """On the CPU they are themselves, and not copied. They may not be written to before `wait` has returned."""
        self._sources, self._copies, self._done = tensors, list(tensors), None
        device = tensors[0].device
        if device.type == "cuda":
            self._copies, self._done = _begin(tensors, device)

    def wait(self) -> list[Tensor]:
        """The tensors on the host, in their order, once they are there."""
        if self._done is not None:
            self._done.synchronize()
        self._sources = ()  # whose memory the copying needed until now
        return self._copies


def _begin(tensors: tuple[Tensor, ...], device: torch.device) -> tuple[list[Tensor], torch.cuda.Event]:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        for copy, each in zip(copies, tensors, strict=True):
            copy.copy_(each, non_blocking=True)
        done = torch.cuda.Event(blocking=True)
        done.record(stream)
    return copies, done
