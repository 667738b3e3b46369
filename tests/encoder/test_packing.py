"""The layout of packed slices equals what transformers computes on the device. Padding: see test_graphs.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
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

from gridsieve.families.cosmos.tower import SmoothedTable
from gridsieve.families.parts.tables import InterpolatedTable
from gridsieve.families.qwen.tower import corner_axis
from gridsieve.services.encoder.tower.packing import Side, TowerShape, lay_out

PATCH_PX = 14


@st.composite
def packings(draw: st.DrawFn) -> tuple[list[Side], int]:
    merge, tokens = draw(st.sampled_from([1, 2, 3])), st.integers(1, 9)
    sides = draw(st.lists(st.tuples(tokens, tokens), min_size=1, max_size=6))
    return [Side(rows * merge, columns * merge) for rows, columns in sides], merge


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
    grids = torch.tensor([(1, side.rows, side.columns) for side in sides])
    found = lay_out(sides, TowerShape(merge, window_side, InterpolatedTable(table_side, corner_axis)))
    assert_same(found.positions, get_vision_position_ids(grids, merge))
    assert_same(found.ends, get_vision_cu_seqlens(grids))
    assert found.longest == max(side.rows * side.columns for side in sides)
    order, window_ends = get_vision_window_index(grids, merge, window_side * merge * PATCH_PX, PATCH_PX)
    assert_same(found.order, order)
    assert_same(found.window_ends, window_ends)
    assert found.longest_window == int(window_ends.diff().max())
    taps, weights = get_vision_interpolation_indices_and_weights(
        grids, table_side, mode="bilinear", align_corners=True, spatial_merge_size=merge
    )
    assert_same(found.by_row["entries"], taps)
    assert_same(found.by_row["weights"], weights)


@settings(max_examples=40)
@given(packing=packings().filter(lambda each: each[1] > 1), table_side=st.sampled_from([1, 2, 6, 16]))
def test_a_smoothed_table_is_resized_to_each_slice_as_an_image_is(
    packing: tuple[list[Side], int], table_side: int
) -> None:
    """With a merge: of slices of one column torch's own weighs the rows wrongly."""
    sides, merge = packing
    found = lay_out(sides, TowerShape(merge, table=SmoothedTable(table_side)))
    table = torch.randn(table_side, table_side, 3, generator=torch.Generator().manual_seed(1))
    row, column = torch.from_numpy(found.by_row["table_weights"]).unbind(1)
    ours = torch.einsum("pr,pc,rcd->pd", row, column, table)
    theirs = []
    for rows, columns, *_ in sides:
        resized = F.interpolate(
            table.permute(2, 0, 1)[None], (rows, columns), mode="bilinear", align_corners=False, antialias=True
        )
        y, x = get_vision_position_ids(torch.tensor([(1, rows, columns)]), merge).unbind(1)
        theirs.append(resized[0, :, y, x].T)
    torch.testing.assert_close(ours, torch.cat(theirs), atol=5e-6, rtol=0)
