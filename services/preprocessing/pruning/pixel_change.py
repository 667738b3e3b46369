"""The score of `pixel_change`: how much the pixels of a token changed since the slice before."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from framesieve.services.preprocessing.video.resize import UInt8Array


def scores(before: UInt8Array, now: UInt8Array, side: int) -> NDArray[np.float32]:
    """float32 [h·w], from 0 to 1. before, now: uint8 [F, H, W, 3], two slices in order."""
    block = side // 4
    means = [
        each.mean(axis=(0, 3), dtype=np.float32).reshape(each.shape[1] // block, block, -1, block).mean(axis=(1, 3))
        for each in (before, now)
    ]
    change = np.abs(means[1] - means[0]) / np.float32(255)
    rows, columns = change.shape
    largest: NDArray[np.float32] = change.reshape(rows // 4, 4, columns // 4, 4).max(axis=(1, 3)).ravel()
    return largest
