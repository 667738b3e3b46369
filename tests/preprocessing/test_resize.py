"""Resized pixels are within two levels of transformers and Pillow, and sizes shrink to a limit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from services.preprocessing.video.resize import resize, shrink_to


@given(rows=st.integers(1, 600), columns=st.integers(1, 600), tokens=st.integers(1, 5000))
def test_a_size_is_shrunk_no_more_than_necessary(rows: int, columns: int, tokens: int) -> None:
    height, width = shrink_to(rows * 28, columns * 28, 28, tokens * 28 * 28)
    assert (height % 28, width % 28) == (0, 0)
    assert 28 <= height <= rows * 28
    assert 28 <= width <= columns * 28
    assert height * width <= tokens * 28 * 28
    if rows * columns <= tokens:
        assert (height, width) == (rows * 28, columns * 28)
    else:
        assert (min(height, width) + 28) * max(height, width) > tokens * 28 * 28


def noise(height: int, width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Noise, on which two resamplers do not agree by chance."""
    return np.random.default_rng(3).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((240, 320), (140, 196)),
        ((480, 640), (476, 644)),
        ((480, 640), (504, 616)),
        ((90, 120), (140, 196)),
        ((37, 53), (28, 84)),
        ((541, 963), (140, 252)),
    ],
)
def test_pixels_are_within_two_levels_of_transformers(source: tuple[int, int], target: tuple[int, int]) -> None:
    pixels = noise(*source)
    theirs = F.interpolate(
        torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous(), size=target, mode="bicubic", antialias=True
    )
    ours = resize(pixels, *target)
    assert ours.shape == (*target, 3)
    difference = np.abs(ours.astype(int) - theirs[0].permute(1, 2, 0).numpy().astype(int))
    assert difference.max() <= 2
    assert (difference == 0).mean() >= 0.99


SIDES_PX = st.integers(1, 150)


@given(rows=SIDES_PX, columns=SIDES_PX, height=SIDES_PX, width=SIDES_PX, reversed_=st.booleans())
def test_pixels_equal_pillows_horizontal_then_vertical_pass(
    rows: int, columns: int, height: int, width: int, reversed_: bool
) -> None:
    pixels = noise(rows, columns)[:: -1 if reversed_ else 1]
    across = Image.fromarray(np.ascontiguousarray(pixels)).resize((width, rows), Image.Resampling.BICUBIC)
    theirs = np.asarray(across.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    difference = np.abs(resize(pixels, height, width) - theirs)
    # Sums of exactly half a level, frequent where a side is doubled or halved, round by the last bit of the weights.
    assert difference.max() <= 2
    assert (difference != 0).sum() <= 3 + 0.05 * difference.size
