"""Computes the size of a frame after resizing, and resizes frames.

Source: `smart_resize` of transformers' Qwen2-VL processors, and of its Qwen3-VL video processor where frames share a
budget, formula for formula. Resampling follows `F.interpolate(uint8, bicubic, antialias=True)`, which they call, and
Pillow, to within two of 255 levels; it is computed as matrix products, which are faster than Pillow's loops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from common.contract.errors import MediaRejected

UInt8Array: TypeAlias = NDArray[np.uint8]
Float32Array: TypeAlias = NDArray[np.float32]
Float64Array: TypeAlias = NDArray[np.float64]

MAX_ASPECT_RATIO = 200

_CHANNELS = 3
_HALF = np.float32(0.5)
# Output pixels of one matrix product: more would multiply more zeros, fewer would need more calls.
_COLUMNS_AT_ONCE, _ROWS_AT_ONCE = 12, 8
# Small enough for the float rows of one horizontal pass to stay in the CPU cache.
_BAND_ROWS = 60

# OpenBLAS ends the process if it cannot allocate its buffer (32 MiB a thread). This product allocates the buffer on
# import, before a worker's memory is limited, so that later shortages raise MemoryError.
np.matmul(*np.ones((2, 256, 256), np.float32))


@dataclass(frozen=True, slots=True)
class PixelBudget:
    """Bounds on a resized frame: sides are multiples of `factor_px`, the area is within [min_px, max_px]."""

    factor_px: int
    min_px: int
    max_px: int


def smart_resize(
    height_px: int, width_px: int, budget: PixelBudget, frames: int = 1, rounded_frames: int = 1
) -> tuple[int, int]:
    """Height and width within the budget that keep the aspect ratio as closely as possible.

    frames: number of frames that share the budget. rounded_frames: their number as transformers counts it when it
    checks the budget. Raises MediaRejected for an aspect ratio above 200; its text continues the item's name.
    """
    ratio = max(height_px, width_px) / min(height_px, width_px)
    if ratio > MAX_ASPECT_RATIO:
        raise MediaRejected(
            f"has frames of {width_px}×{height_px} pixels, an aspect ratio of {ratio:.0f}, "
            f"at most {MAX_ASPECT_RATIO} is allowed"
        )
    factor = budget.factor_px
    height, width = round(height_px / factor) * factor, round(width_px / factor) * factor
    if rounded_frames * height * width > budget.max_px:
        shrink = math.sqrt(frames * height_px * width_px / budget.max_px)
        height = max(factor, math.floor(height_px / shrink / factor) * factor)
        width = max(factor, math.floor(width_px / shrink / factor) * factor)
    elif rounded_frames * height * width < budget.min_px:
        grow = math.sqrt(budget.min_px / (frames * height_px * width_px))
        height = math.ceil(height_px * grow / factor) * factor
        width = math.ceil(width_px * grow / factor) * factor
    return height, width


def shrink_to(height_px: int, width_px: int, factor_px: int, max_px: int) -> tuple[int, int]:
    """Shrinks a size in multiples of `factor_px` to at most `max_px`, which must be at least factor_px².

    `smart_resize` rounds some sizes up past its own maximum.
    """
    while height_px * width_px > max_px:
        if height_px > width_px:
            height_px -= factor_px
        else:
            width_px -= factor_px
    return height_px, width_px


def resize(pixels: UInt8Array, height_px: int, width_px: int) -> UInt8Array:
    """uint8 [H, W, 3] to uint8 [height_px, width_px, 3], bicubic with antialiasing."""
    rows, columns = pixels.shape[:2]
    if (rows, columns) == (height_px, width_px):
        return pixels
    # Horizontally first, and rounded to whole levels in between, as torch does: the other order differs by up to 15.
    values = pixels.reshape(rows, columns * _CHANNELS)
    if columns != width_px:
        values = _across(values, width_px)
    if rows != height_px:
        values = _down(values, height_px)
    return values.reshape(height_px, width_px, _CHANNELS)


def _across(values: UInt8Array, width_px: int) -> UInt8Array:
    """uint8 [H, W·3] to uint8 [H, width_px·3]."""
    rows, made = len(values), width_px * _CHANNELS
    starts, weights = _products(values.shape[1] // _CHANNELS, width_px, _COLUMNS_AT_ONCE, _CHANNELS)
    reach, step = weights.shape[1:]
    resized = np.empty((rows, made), np.uint8)
    read = np.empty((min(rows, _BAND_ROWS), values.shape[1]), np.float32)
    sums = np.empty((len(read), len(starts) * step), np.float32)
    for top in range(0, rows, _BAND_ROWS):
        band = slice(min(rows - top, _BAND_ROWS))
        read[band] = values[top:][band]
        read[band] += _HALF
        for number, start in enumerate(starts):
            to = slice(number * step, (number + 1) * step)
            np.matmul(read[band, start : start + reach], weights[number], out=sums[band, to])
        _round(sums[band, :made], resized[top:][band])
    return resized


def _down(values: UInt8Array, height_px: int) -> UInt8Array:
    """uint8 [H, N] to uint8 [height_px, N]."""
    starts, weights = _products(len(values), height_px, _ROWS_AT_ONCE, 1)
    reach, step = weights.shape[1:]
    resized = np.empty((height_px, values.shape[1]), np.uint8)
    read = np.empty((reach, values.shape[1]), np.float32)
    sums = np.empty((step, values.shape[1]), np.float32)
    for number, start in enumerate(starts):
        read[:] = values[start : start + reach]
        read += _HALF
        np.matmul(weights[number].T, read, out=sums)
        rows = resized[number * step :][:step]
        _round(sums[: len(rows)], rows)
    return resized


def _round(sums: Float32Array, levels: UInt8Array) -> None:
    """Truncates to uint8, which rounds: the inputs had 0.5 added, and weights sum to one. Overwrites `sums`."""
    np.clip(sums, 0, 255, out=sums)
    levels[:] = sums


@lru_cache(maxsize=4)
def _products(before: int, after: int, step: int, channels: int) -> tuple[tuple[int, ...], Float32Array]:
    """One resampling pass from `before` pixels to `after` as matrix products, each of which makes `step` pixels.

        pixels read    · · · · · · · · · ·          each product reads `reach` of them, from its start on
        product 0      ─────────
        product 1              ─────────            the last may make too many pixels: their weights are zero

    Returns the start of each product in values, and weights, float32 [products, reach · channels, step · channels].
    """
    scale = before / after
    stretch = max(scale, 1.0)
    centres = (np.arange(after) + 0.5) * scale
    first = np.maximum(centres - 2 * stretch + 0.5, 0).astype(int)
    end = np.minimum(centres + 2 * stretch + 0.5, before).astype(int)
    taps = int((end - first).max())
    # At the far edge some windows would read past the end: they begin earlier, with weights of zero.
    pixels = np.minimum(first, before - taps)[:, None] + np.arange(taps)
    weights = _cubic((pixels + 0.5 - centres[:, None]) / stretch)
    weights /= weights.sum(1, keepdims=True)

    number, place = np.divmod(np.arange(after), step)
    starts = pixels[::step, 0]
    reach = int((pixels[:, -1] - starts[number]).max()) + 1
    starts = np.minimum(starts, before - reach)
    matrices = np.zeros((len(starts), reach, step), np.float32)
    matrices[number[:, None], pixels - starts[number][:, None], place[:, None]] = weights
    return tuple((starts * channels).tolist()), np.kron(matrices, np.eye(channels, dtype=np.float32)[None])


def _cubic(distance: Float64Array) -> Float64Array:
    """Keys' cubic convolution with a = −1/2, at distances in pixels."""
    x = np.abs(distance)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))
