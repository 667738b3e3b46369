"""What a device can do at the best, measured on it: the rates that everything else is held against."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median

import torch

_REPEATS = 20


def seconds(work: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Median wall time of `work`, until the device has done it; the first call is not counted."""
    taken = []
    for index in range(repeats + 1):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        if index:
            taken.append(time.perf_counter() - start)
    return median(taken)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def operations_per_s(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Of one product of two square matrices: 2 · side³ operations."""
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / seconds(lambda: one @ other, device)


def copied_bytes_per_s(device: torch.device, size_bytes: int) -> float:
    """Of one copy within the device's memory: bytes read and bytes written count."""
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / seconds(lambda: target.copy_(source), device)


def give_back(device: torch.device) -> None:
    """What is no longer used: the next measurement begins with the memory that the first had, and so do services."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this processor"
