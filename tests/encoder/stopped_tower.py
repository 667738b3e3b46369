"""A tower that stops before each forward until it is let, and fails at slices of certain names; for batchers."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

TIMEOUT_S = 10


class StoppedTower:
    """A tower that runs when it is let, and remembers which slices came together; each slice's value is its name.

    made: what each forward that lacked memory had made by then.
    """

    def __init__(self) -> None:
        self.forwards: list[list[int]] = []
        self.made: list[weakref.ref[Tensor]] = []
        self.started = threading.Semaphore(0)
        self.go = threading.Semaphore(0)

    def encode(self, slices: Sequence[Tensor]) -> list[Tensor]:
        self.forwards.append([int(frames[0]) for frames in slices])
        self.started.release()
        assert self.go.acquire(timeout=TIMEOUT_S)
        if any(int(frames[0]) == 13 for frames in slices):
            raise RuntimeError("unlucky")
        if any(int(frames[0]) == 14 for frames in slices):
            raise torch.AcceleratorError("an illegal memory access was encountered")
        if any(int(frames[0]) == 16 or (int(frames[0]) == 15 and len(slices) > 1) for frames in slices):
            made = torch.zeros(3)
            self.made.append(weakref.ref(made))
            raise torch.OutOfMemoryError("none is left")
        return [torch.full((1, int(frames[1]), 2), float(frames[0])) for frames in slices]


def run_all(tower: StoppedTower) -> None:
    for _ in range(20):
        tower.go.release()
