"""The layout of packed slices equals what transformers computes on the device, and padding does not change it."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from services.encoder.tower.graph_buckets import Size
from services.encoder.tower.packing import Side, TowerShape, lay_out, pad, size_of

PATCH_PX = 14


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[Side], int]:
    merge, tokens = draw(st.sampled_from([1, 2, 3])), st.integers(1, 9)
    sides = draw(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6))
    return [(rows * merge, columns * merge) for rows, columns in sides], merge


def assert_same(ours: NDArray[Any] | None, theirs: Tensor) -> None:
    assert ours is not None
    found = torch.from_numpy(ours)
    assert found.dtype == theirs.dtype
    assert torch.equal(found, theirs)


@settings(max_examples=40)
@given(packing=packings(), window_side=st.integers(1, 5), table_side=st.sampled_from([1, 2, 6, 48]))
def test_layouts_equal_transformers_to_the_last_bit(
    packing: tuple[list[Side], int], window_side: int, table_side: int
) -> None:
    sides, merge = packing
    grids = torch.tensor([(1, *side) for side in sides])
    found = lay_out(sides, TowerShape(merge, window_side, table_side))
    assert_same(found.positions, get_vision_position_ids(grids, merge))
    assert_same(found.ends, get_vision_cu_seqlens(grids))
    assert found.longest == max(rows * columns for rows, columns in sides)
    order, window_ends = get_vision_window_index(grids, merge, window_side * merge * PATCH_PX, PATCH_PX)
    assert_same(found.order, order)
    assert_same(found.window_ends, window_ends)
    assert found.longest_window == int(window_ends.diff().max())
    taps, weights = get_vision_interpolation_indices_and_weights(
        grids, table_side, mode="bilinear", align_corners=True, spatial_merge_size=merge
    )
    assert_same(found.interpolation_indices, taps)
    assert_same(found.interpolation_weights, weights)


@settings(max_examples=40)
@given(packing=packings(), window_side=st.integers(0, 5), more=st.tuples(*[st.integers(0, 40)] * 3))
def test_padding_is_in_no_sequence_and_keeps_the_layout(
    packing: tuple[list[Side], int], window_side: int, more: tuple[int, int, int]
) -> None:
    sides, merge = packing
    shape = TowerShape(merge, window_side=window_side, table_side=6)
    bare = lay_out(sides, shape)
    taken = sum((size_of(side, shape) for side in sides), Size(0, 0, 0))
    windows = 0 if bare.window_ends is None else len(bare.window_ends) - 1
    assert taken == Size(len(bare.positions) // merge**2, len(bare.ends) - 1, windows)
    bucket = taken + Size(*more)
    padded = pad(bare, bucket, shape)
    for before, after in zip(bare.arrays, padded.arrays, strict=True):
        assert after.dtype == before.dtype
        assert np.array_equal(after[: len(before)], before)
    patches = bucket.tokens * merge**2
    lengths = {len(padded.positions), len(padded.interpolation_indices), len(padded.interpolation_weights)}  # type: ignore[arg-type]
    assert lengths == {patches}
    _assert_empty_behind(padded.ends, bare.ends, bucket.slices)
    assert padded.longest == patches
    if window_side:
        _assert_empty_behind(padded.window_ends, bare.window_ends, bucket.windows)
        assert padded.order is not None
        assert np.array_equal(padded.order[taken.tokens :], range(taken.tokens, bucket.tokens))
        assert bare.longest_window <= padded.longest_window <= (window_side * merge) ** 2


def _assert_empty_behind(padded: NDArray[Any] | None, bare: NDArray[Any] | None, sequences: int) -> None:
    assert padded is not None
    assert bare is not None
    assert len(padded) == sequences + 1
    assert (padded[len(bare) :] == bare[-1]).all()
