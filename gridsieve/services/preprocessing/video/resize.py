"""Computes the size of a frame after resizing, and resizes frames.

Source: `smart_resize` of transformers' Qwen2-VL processors, and of its Qwen3-VL video processor where frames share a
budget, formula for formula. Resampling follows `F.interpolate(bicubic, antialias=True)`, which they call, of uint8 or
float32. Of uint8 it is that, and Pillow's, to within two of 255 levels. It is computed as matrix products, which are
faster than Pillow's loops. Many small ones, as each multiplies mostly zeros, and a few calls of `matmul` over
overlapping views, as a call takes longer than a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.errors import MediaRejected

UInt8Array: TypeAlias = NDArray[np.uint8]
# Frames as they are sent.
FrameArray: TypeAlias = NDArray[np.uint8] | NDArray[np.float32]
Float32Array: TypeAlias = NDArray[np.float32]
Float64Array: TypeAlias = NDArray[np.float64]

MAX_ASPECT_RATIO = 200

_CHANNELS = 3
_HALF = np.float32(0.5)
# What one matrix product makes: more would multiply more zeros, less would not fill the CPU's vector registers.
_VALUES_A_PRODUCT, _ROWS_A_PRODUCT = 16, 8
# What one call's products read or make: their floats are to stay in the CPU's second cache.
_VALUES_A_CALL, _ROWS_A_CALL = 384, 384

# OpenBLAS ends the process if it cannot allocate its buffer (32 MiB a thread). This product allocates the buffer on
# import, before a worker's memory is limited, so that later shortages raise MemoryError.
np.matmul(*np.ones((2, 256, 256), np.float32))


@dataclass(frozen=True, slots=True)
class PixelBudget:
    """Bounds on a resized frame: sides are multiples of `factor_px`, the area is within [min_px, max_px]."""

    factor_px: int
    min_px: int
    max_px: int


@dataclass(frozen=True, slots=True)
class View:
    """The part of a frame that is sent: it is resized to height_px × width_px, and a window at (top, left) is cut out.

    Pixels outside of the resized frame are black. squared: the frame is padded to a square with this colour, RGB,
    before it is resized; None: it is not. through: heights and widths to which it is resized before, one after the
    other, of processors that resize more than once. lanczos: whether by Lanczos' filter, and not the bicubic one.
    """

    height_px: int
    width_px: int
    top: int = 0
    left: int = 0
    squared: tuple[int, int, int] | None = None
    through: tuple[tuple[int, int], ...] = ()
    lanczos: bool = False


def centre_view(height_px: int, width_px: int, shorter_px: int, sent: tuple[int, int]) -> View:
    """The centre of a frame whose shorter side is resized to `shorter_px`. An odd row or column is left out at the end.

    Source: `get_resize_output_image_size` and `center_crop` of transformers 5.24.
    """
    longer_px = int(shorter_px * max(height_px, width_px) / min(height_px, width_px))
    height, width = (shorter_px, longer_px) if height_px <= width_px else (longer_px, shorter_px)
    return View(height, width, (height - sent[0]) // 2, (width - sent[1]) // 2)


def check_aspect(height_px: int, width_px: int) -> None:
    """Raises MediaRejected for an aspect ratio above 200; its text continues the item's name."""
    if max(height_px, width_px) > MAX_ASPECT_RATIO * min(height_px, width_px):
        raise MediaRejected(
            f"has {width_px}×{height_px} pixels, an aspect ratio of at most {MAX_ASPECT_RATIO} is allowed"
        )


def smart_resize(
    height_px: int, width_px: int, budget: PixelBudget, frames: int = 1, rounded_frames: int = 1
) -> tuple[int, int]:
    """Height and width within the budget that keep the aspect ratio as closely as possible.

    frames: number of frames that share the budget. rounded_frames: their number as transformers counts it when it
    checks the budget. Raises MediaRejected for an aspect ratio above 200.
    """
    check_aspect(height_px, width_px)
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


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """Matrix products that are computed by one call, because each reads from `stride` values after the one before.

        values read    · · · · · · · · · · · · ·
        product 0      ─────────
        product 1          ─────────             makes the values that follow product 0's
        product 2              ─────────

    weights: float32 [products, reach, step]: a product reads `reach` values and makes `step`.
    taken, placed: what is read of the frame, and its place among all that is read. At the frame's edges products read
    past it, with weights of zero. made: the values made, of the resized frame.
    """

    stride: int
    weights: Float32Array
    taken: slice
    placed: slice
    made: slice

    @property
    def reads(self) -> int:
        """Number of values that are read."""
        products, reach, _ = self.weights.shape
        return int((products - 1) * self.stride + reach)

    @property
    def makes(self) -> int:
        """Number of values that are made. The last may lie outside the resized frame."""
        products, _, step = self.weights.shape
        return int(products * step)


def _cubic(distance: Float64Array) -> Float64Array:
    """Keys' cubic convolution with a = −1/2, at distances in pixels."""
    x = np.abs(distance)
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _windowed_sinc(distance: Float64Array) -> Float64Array:
    """Lanczos' window of three lobes over the sinc, at distances in pixels."""
    return np.where(np.abs(distance) < 3, np.sinc(distance) * np.sinc(distance / 3), 0)


@dataclass(frozen=True, slots=True)
class Filter:
    """weights: of pixels at these distances. reach: beyond which they are 0, in pixels."""

    reach: int
    weights: Callable[[Float64Array], Float64Array]


_BICUBIC, _LANCZOS = Filter(2, _cubic), Filter(3, _windowed_sinc)


def view_into(pixels: UInt8Array, view: View | None, sent: FrameArray, made: dict[View, FrameArray]) -> None:
    """Fills uint8 or float32 [h, w, 3] with a view of uint8 [H, W, 3]; None: with the whole, resized.

    made: this frame, resized for other views of it, by views of which the window is at (0, 0); what is made here is
    added. Tiles of an image are windows of one resized image.
    """
    if view is None:
        resize_into(pixels, sent)
        return
    whole = replace(view, top=0, left=0)
    if whole not in made:
        made[whole] = _resized(pixels, view, sent.dtype)
    resized = made[whole]
    sent[:] = 0
    taken, placed = zip(
        *(
            _overlap(first, of, to)
            for first, of, to in zip((view.top, view.left), resized.shape, sent.shape[:2], strict=False)
        ),
        strict=True,
    )
    sent[placed] = resized[taken]


def _resized(pixels: UInt8Array, view: View, dtype: np.dtype[Any]) -> FrameArray:
    """The whole frame that a view is a window of, [height_px, width_px, 3]."""
    filtered = _LANCZOS if view.lanczos else _BICUBIC
    shown = pixels if view.squared is None else _squared(pixels, view.squared)
    for size in view.through:
        before, shown = shown, np.empty((*size, _CHANNELS), np.uint8)
        resize_into(before, shown, filtered)
    resized: FrameArray = np.empty((view.height_px, view.width_px, _CHANNELS), dtype)
    resize_into(shown, resized, filtered)
    return resized


def _overlap(first: int, length: int, sent: int) -> tuple[slice, slice]:
    """The places of an axis that are sent, among `length` and among those that are sent, which begin at `first`."""
    begin, end = max(first, 0), min(first + sent, length)
    return slice(begin, max(begin, end)), slice(begin - first, max(begin, end) - first)


def _squared(pixels: UInt8Array, colour: tuple[int, int, int]) -> UInt8Array:
    """The frame in the middle of a square of its longer side."""
    height, width, _ = pixels.shape
    side = max(height, width)
    square = np.empty((side, side, _CHANNELS), np.uint8)
    square[:] = colour
    top, left = (side - height) // 2, (side - width) // 2
    square[top : top + height, left : left + width] = pixels
    return square


def resize_into(pixels: UInt8Array, resized: FrameArray, filtered: Filter = _BICUBIC) -> None:
    """Fills uint8 or float32 [h, w, 3], contiguous, from uint8 [H, W, 3], with antialiasing.

    Of float32 some values lie below 0 or above 255, where resampling overshoots.
    """
    if pixels.shape == resized.shape:
        resized[:] = pixels
        return
    (rows, columns), (height, width) = pixels.shape[:2], resized.shape[:2]
    values = pixels.reshape(rows, columns * _CHANNELS)
    levels = np.ndarray((height, width * _CHANNELS), resized.dtype, resized)
    rounds = resized.dtype == np.uint8
    across = _calls(columns, width, _CHANNELS, _VALUES_A_PRODUCT, _VALUES_A_CALL, filtered)
    down = _calls(rows, height, 1, _ROWS_A_PRODUCT, _ROWS_A_CALL, filtered)
    # Zeros, as what lies outside the frame must be finite.
    read = np.zeros((max(band.reads for band in down), max(panel.reads for panel in across)), np.float32)
    sums = np.empty((len(read), max(panel.makes for panel in across)), np.float32)
    made = np.empty((max(band.makes for band in down), sums.shape[1]), np.float32)
    for panel in across:
        for band in down:
            read[band.placed, panel.placed] = values[band.taken, panel.taken]
            # Horizontally first, and rounded to whole levels in between, as torch does: the other order differs by 15.
            across_sums, down_sums = sums[: band.reads, : panel.makes], made[: band.makes, : panel.makes]
            _multiply_across(read, panel, across_sums)
            if rounds:
                np.rint(across_sums, out=across_sums)
                across_sums.clip(0, 255, out=across_sums)
            _multiply_down(sums, band, down_sums)
            if rounds:
                down_sums += _HALF  # truncating rounds them
                down_sums.clip(0, 255, out=down_sums)
            part = levels[band.made, panel.made]
            part[:] = made[: part.shape[0], : part.shape[1]]


def _multiply_across(read: Float32Array, panel: _Call, sums: Float32Array) -> None:
    products, reach, step = panel.weights.shape
    row_bytes, value_bytes = read.strides
    windows = np.ndarray(
        (products, len(sums), reach), np.float32, read, 0, (panel.stride * value_bytes, row_bytes, value_bytes)
    )
    np.matmul(windows, panel.weights, out=sums.reshape(-1, products, step).transpose(1, 0, 2))


def _multiply_down(sums: Float32Array, band: _Call, made: Float32Array) -> None:
    products, reach, step = band.weights.shape
    row_bytes, value_bytes = sums.strides
    windows = np.ndarray(
        (products, reach, made.shape[1]), np.float32, sums, 0, (band.stride * row_bytes, row_bytes, value_bytes)
    )
    np.matmul(band.weights.transpose(0, 2, 1), windows, out=made.reshape(products, step, -1))


@lru_cache(maxsize=8)
def _calls(before: int, after: int, channels: int, step: int, at_most: int, filtered: Filter) -> tuple[_Call, ...]:
    """The resampling of a side from `before` pixels to `after` as matrix products that make `step` values each.

    at_most: of the values that a call reads, without what its last product reads past its stride, and makes.
    """
    values, weights = _taps(before, after, channels, filtered)
    stride = round(step * before / after)
    made = max(at_most // max(stride, step), 1) * step
    calls = []
    for first in range(0, len(values), made):
        taps, tap_weights = values[first:][:made], weights[first:][:made]
        product, place = np.divmod(np.arange(len(taps)), step)
        start = int((taps[:, 0] - product * stride).min())
        reads = taps - (start + product * stride)[:, None]
        matrices = np.zeros((int(product[-1]) + 1, int(reads.max()) + 1, step), np.float32)
        matrices[product[:, None], reads, place[:, None]] = tap_weights
        end = start + int(product[-1]) * stride + matrices.shape[1]
        taken = slice(max(start, 0), min(end, before * channels))
        placed = slice(taken.start - start, taken.stop - start)
        calls.append(_Call(stride, matrices, taken, placed, slice(first, first + len(taps))))
    return tuple(calls)


def _taps(before: int, after: int, channels: int, filtered: Filter) -> tuple[NDArray[np.int64], Float64Array]:
    """The values of a side that each resized value is a sum of, and their weights: both [after · channels, taps]."""
    scale = before / after
    stretch = max(scale, 1.0)
    centres = (np.arange(after) + 0.5) * scale
    reach = filtered.reach * stretch
    first = np.maximum(centres - reach + 0.5, 0).astype(int)
    end = np.minimum(centres + reach + 0.5, before).astype(int)
    number = int((end - first).max())
    # At the far edge some windows would read past the end: they begin earlier, with weights of zero.
    pixels = np.minimum(first, before - number)[:, None] + np.arange(number)
    weights = filtered.weights((pixels + 0.5 - centres[:, None]) / stretch)
    weights /= weights.sum(1, keepdims=True)
    values = pixels[:, None] * channels + np.arange(channels)[:, None]
    return values.reshape(-1, number), np.repeat(weights, channels, axis=0)
