"""Measures a device's peak rates, which the other measurements are compared with."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median

import torch

_REPEATS = 20


def seconds(work: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """Median wall time of `work`, until the device has finished it; the first call does not count."""
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
    """Operations/s of one product of two square matrices: 2 · side³ operations."""
    one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return 2 * side**3 / seconds(lambda: one @ other, device)


def copied_bytes_per_s(device: torch.device, size_bytes: int) -> float:
    """Bytes/s of one copy within the device's memory, counting bytes read and written."""
    source = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size_bytes / seconds(lambda: target.copy_(source), device)


def give_back(device: torch.device) -> None:
    """Frees unused device memory, so that the next measurement or service has all of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this processor"
