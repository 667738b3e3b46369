"""How large a frame becomes, and the resizing itself.

Source: `smart_resize` of transformers' Qwen2-VL processors, and of its Qwen3-VL video processor where frames share a
budget, formula for formula; the resampling is Pillow's bicubic, which is within two levels of 255 of the
`F.interpolate(uint8, bicubic, antialias=True)` that they call.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from common.errors import MediaRejected

UInt8Array: TypeAlias = NDArray[np.uint8]

MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, slots=True)
class PixelBudget:
    """Bounds on what is sent: sides are multiples of `factor_px`, the area within [min_px, max_px]."""

    factor_px: int
    min_px: int
    max_px: int


def smart_resize(
    height_px: int, width_px: int, budget: PixelBudget, frames: int = 1, rounded_frames: int = 1
) -> tuple[int, int]:
    """Height and width that keep the aspect ratio as nearly as the budget allows.

    frames: how many share the budget. rounded_frames: the same, as transformers counts them to tell whether it is kept.
    Raises MediaRejected for a picture that is more than 200 times as long as it is wide.
    """
    ratio = max(height_px, width_px) / min(height_px, width_px)
    if ratio > MAX_ASPECT_RATIO:
        raise MediaRejected(
            f"a frame of {width_px}×{height_px} pixels has an aspect ratio of {ratio:.0f}, at most {MAX_ASPECT_RATIO}"
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
    """A size in multiples of `factor_px` made small enough: `smart_resize` rounds some up, past its own maximum.

    max_px: at least factor_px².
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
    image = Image.fromarray(pixels)
    # Across before down, as torch does: Pillow alone turns the order round where that is cheaper, and the rounding
    # between the two passes then moves some values by 15 levels.
    for size in ((width_px, rows), (width_px, height_px)):
        image = image.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(image)
