"""What a step needs of the host, copied to the device while the host goes on."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """An array's numbers on the device; on the CPU, the array itself.

    By way of pinned memory, which torch keeps until it is copied: else CUDA would have the host wait for it.
    """
    host = torch.from_numpy(array)
    if device.type == "cuda" and array.size:
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
