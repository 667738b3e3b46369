"""Parts of tensors that are divided among ranks."""

from __future__ import annotations

from torch import Tensor


def part(whole: Tensor, axis: int, rank: int, ranks: int) -> Tensor:
    """A rank's part of a tensor that is divided along an axis; the last ranks have less or nothing."""
    length = whole.shape[axis]
    largest = -(-length // ranks)
    start = min(rank * largest, length)
    return whole.narrow(axis, start, min(largest, length - start)).clone()
