"""How much the pixels of each token changed since the temporal slice before, from resized frames.

    frames of a slice ─▶ mean colours of 4 × 4 blocks a token ─▶ differences to the slice before ─▶ a token's largest

A block has 7 or 8 pixels a side: its mean has little noise of camera and codec, but shows a small object that enters
the token. Slices are scored one at a time, and of the slice before only the means are needed. It knows neither grids
nor rates.
Sources: Run-Length Tokenization, arXiv 2411.05222, compares the pixels of consecutive patches before the tower. Means
of blocks, and their largest difference, are Gridsieve's own.
"""

from __future__ import annotations

import numpy as np

from gridsieve.common.contract.plan import Int32Array
from gridsieve.services.preprocessing.video.resize import Float32Array, FrameArray

_CHANNELS = 3
BLOCKS_A_SIDE = 4
# Means are rounded down to sixteenths of a level: differences of integers are exact everywhere.
_STEPS_A_LEVEL = 16
# Of changes, in a level.
STEPS = _CHANNELS * _STEPS_A_LEVEL


def block_means(frames: FrameArray, token_px: int) -> Int32Array:
    """The mean colours of the blocks of one slice, over all its frames, in sixteenths of a level.

    frames: [f, H, W, 3], f up to 32; uint8, or float32, which is rounded first. token_px: the side of a token, 28 or
        32, which divides H and W.
    Returns int32 [3, 4·H / token_px, 4·W / token_px].
    """
    count, height, width, _ = frames.shape
    side = token_px // BLOCKS_A_SIDE
    rows, columns = height // side, width // side
    # numpy's sums over an axis as short as a block take several times as long as these additions.
    lines = np.zeros((rows, width * _CHANNELS), np.uint16)
    levels = frames if frames.dtype == np.uint8 else np.rint(frames).clip(0, 255).astype(np.uint8)
    for frame in levels:
        for line in frame.reshape(rows, side, -1).swapaxes(0, 1):
            lines += line
    sums = np.zeros((_CHANNELS, rows, columns), np.int32)
    for column in lines.reshape(rows, columns, side, _CHANNELS).transpose(2, 3, 0, 1):
        sums += column
    means: Int32Array = sums * _STEPS_A_LEVEL // (count * side * side)
    return means


def change(means: Int32Array, before: Int32Array) -> Float32Array:
    """The change of each token: of its blocks' differences to the slice before, the largest.

    means, before: of a slice, and of what it is compared with, from `block_means`.
    Returns float32 [h·w], row by row, in levels from 0 to 255, averaged over the three channels; multiples of 1/48.
    """
    return np.divide(change_steps(means, before), STEPS, dtype=np.float32)


def change_steps(means: Int32Array, before: Int32Array) -> Int32Array:
    """As `change`, int32 [h·w], in `STEPS` a level."""
    differences = np.abs(means - before).sum(0)
    rows, columns = (blocks // BLOCKS_A_SIDE for blocks in differences.shape)
    of_rows = differences.reshape(rows, BLOCKS_A_SIDE, -1).max(1)
    largest: Int32Array = of_rows.reshape(rows * columns, BLOCKS_A_SIDE).max(1)
    return largest
