"""A device: its name, its peak rates, and how long work on it takes."""

from __future__ import annotations

import gc
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Self

import torch

_REPEATS = 20


@dataclass(frozen=True, slots=True)
class Peaks:
    """What a device reaches at most, measured. side: of the square matrices whose product is the peak of arithmetic."""

    operations_per_s: float
    bytes_per_s: float
    side: int

    @classmethod
    def measured(cls, device: torch.device, dtype: torch.dtype, side: int, size_bytes: int) -> Self:
        """Of a product of two matrices, and of the faster of a sum, which reads each byte once, and a copy, which also
        writes it."""
        one, other = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
        source = torch.zeros(size_bytes // 4, device=device)
        target = torch.empty_like(source)
        read = size_bytes / seconds(source.sum, device)
        copied = 2 * size_bytes / seconds(lambda: target.copy_(source), device)
        return cls(2 * side**3 / seconds(lambda: one @ other, device), max(read, copied), side)

    def least_s(self, operations: float, size_bytes: float) -> float:
        """The roofline: seconds that so many operations, and bytes read or written, take at least."""
        return max(operations / self.operations_per_s, size_bytes / self.bytes_per_s)

    def __str__(self) -> str:
        return (
            f"peaks of {self.operations_per_s / 1e12:.4g} Tflop/s (a product of {self.side}² matrices) and "
            f"{self.bytes_per_s / 1e9:.4g} GB/s"
        )


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


class Moment:
    """When the device has computed what it was given until now; on the CPU, now."""

    def __init__(self, device: torch.device) -> None:
        self._event: torch.cuda.Event | None = None
        self._now_s = time.perf_counter()
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record(torch.cuda.current_stream(device))

    def until(self, later: Moment) -> float:
        """Seconds to a later moment, which the device must have reached."""
        if self._event is not None and later._event is not None:
            return float(self._event.elapsed_time(later._event)) / 1e3
        return later._now_s - self._now_s


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def give_back(device: torch.device) -> None:
    """Frees unused device memory, so that the next measurement or service has all of it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def about(device: torch.device) -> str:
    """The device with its driver, and torch's version."""
    if device.type != "cuda":
        return f"this processor, torch {torch.__version__}"
    memory = torch.cuda.get_device_properties(device).total_memory / 2**30
    return (
        f"{torch.cuda.get_device_name(device)}, {memory:.1f} GiB, driver {_driver()}, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}"
    )


def card(device: torch.device) -> str:
    """Its name as a part of a file's."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return name.lower().replace(" ", "-").replace("/", "-")


def _driver() -> str:
    if not (command := shutil.which("nvidia-smi")):
        return "unknown"
    query = [command, "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
    return found[0] if found else "unknown"
