"""Resized pixels are within two levels of transformers, and sizes shrink to a limit."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st

from gridsieve.services.preprocessing.video.resize import resize_into, shrink_to


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


SIDES_PX = st.integers(2, 150)  # torch itself fails for some sides of 1


@given(rows=SIDES_PX, columns=SIDES_PX, height=SIDES_PX, width=SIDES_PX)
@example(rows=480, columns=640, height=476, width=644)
@example(rows=541, columns=963, height=140, width=252)
def test_pixels_are_within_two_levels_of_transformers(rows: int, columns: int, height: int, width: int) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (rows, columns, 3), dtype=np.uint8)
    planes = torch.from_numpy(pixels).permute(2, 0, 1)[None].contiguous()
    theirs = F.interpolate(planes, size=(height, width), mode="bicubic", antialias=True)[0].permute(1, 2, 0)
    ours = np.empty((height, width, 3), np.uint8)
    resize_into(pixels, ours)
    difference = np.abs(ours - theirs.numpy().astype(int))
    # Sums of exactly half a level, frequent where a side is doubled or halved, round by the last bit of the weights.
    assert difference.max() <= 2
    assert (difference != 0).sum() <= 3 + 0.05 * difference.size
