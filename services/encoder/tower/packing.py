"""Where the patches of packed slices stand: all that a tower's forward must know of their sizes, made on the host.

    slices:     [ a: 4 × 6 patches ][ b: 4 × 4 ]        sides
    ends:       0                  24         40        sequences of full attention
    order:      [0 1 3 4 | 2 5 || 6 7 8 9]              tokens by window (of 2 × 2 here); the forward puts them back

So the forward asks no device for a number, and what it reads can be padded to the size of a captured one:

    ends:       0   24   40   40   40                   padding stands in no sequence: attention passes it over
    order:      [0 … 9 | 10 11 …]                       and in its own place

It knows numpy alone. The tests hold it to `transformers.vision_utils`, which asks the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from services.encoder.tower.graph_buckets import Size

# Slices of how many sizes stay laid out: those of few videos at once, each a few hundred bytes a token.
_SIZES_KEPT = 32

# Rows and columns of a slice, in patches; multiples of merge.
Side: TypeAlias = tuple[int, int]
Array: TypeAlias = NDArray[Any]

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class TowerShape:
    """What the geometry of a tower follows from.

    merge: patches per side of a token. window_side: of an attention window, in tokens; 0 where there are none.
    table_side: of the square table that position embeddings are interpolated in; 0 where there is none.
    """

    merge: int
    window_side: int = 0
    table_side: int = 0


@dataclass(frozen=True, slots=True)
class Geometry(Generic[A]):
    """Of P patches in T tokens, S slices and W windows; what a tower has no use for is None.

    positions: int64 (P, 2), row and column. ends: int32 (S + 1,), where slices end, in patches; none has more than
    `longest`. order: int64 (T,), tokens by window; window_ends: int32 (W + 1,), in patches, and `longest_window`.
    taps: int64 (P, 4), entries of the table that a patch's embedding is the sum of, tap_weights: float32 (P, 4).
    """

    positions: A
    ends: A
    longest: int
    order: A | None = None
    window_ends: A | None = None
    longest_window: int = 0
    taps: A | None = None
    tap_weights: A | None = None

    def map(self, change: Callable[[A], B]) -> Geometry[B]:
        """The same with every array changed."""
        order, window_ends, taps, tap_weights = (
            None if each is None else change(each)
            for each in (self.order, self.window_ends, self.taps, self.tap_weights)
        )
        positions, ends = change(self.positions), change(self.ends)
        return Geometry(positions, ends, self.longest, order, window_ends, self.longest_window, taps, tap_weights)

    def with_ends_of(self, other: Geometry[A]) -> Geometry[A]:
        """The same, but for where sequences end."""
        return replace(self, ends=other.ends, window_ends=other.window_ends)

    @property
    def arrays(self) -> list[A]:
        """Those that there are, always in one order."""
        each = (self.positions, self.ends, self.order, self.window_ends, self.taps, self.tap_weights)
        return [array for array in each if array is not None]


def size_of(side: Side, shape: TowerShape) -> Size:
    """What one slice takes of a budget."""
    rows, columns = side[0] // shape.merge, side[1] // shape.merge
    windows = -(-rows // shape.window_side) * -(-columns // shape.window_side) if shape.window_side else 0
    return Size(rows * columns, 1, windows)


def lay_out(sides: Sequence[Side], shape: TowerShape) -> Geometry[Array]:
    """The geometry of slices laid end to end; at least one."""
    laid = [_laid(side, shape) for side in sides]
    order, window_ends, longest_window = None, None, 0
    if shape.window_side:
        starts = np.cumsum([0, *(each.tokens for each in laid[:-1])])
        order = np.concatenate([each.order + start for each, start in zip(laid, starts, strict=True)])
        lengths = np.concatenate([each.windows for each in laid])
        window_ends, longest_window = _ends(lengths), int(lengths.max())
    patches = [each.patches for each in laid]
    return Geometry(
        positions=np.concatenate([each.positions for each in laid]),
        ends=_ends(patches),
        longest=max(patches),
        order=order,
        window_ends=window_ends,
        longest_window=longest_window,
        taps=np.concatenate([each.taps for each in laid]) if shape.table_side else None,
        tap_weights=np.concatenate([each.tap_weights for each in laid]) if shape.table_side else None,
    )


def pad(geometry: Geometry[Array], budget: Size, shape: TowerShape) -> Geometry[Array]:
    """The same as a forward of the budget's size reads it, whose longest sequences are as long as any may be there."""
    assert (geometry.order is None) == (shape.window_side == 0)
    patches = budget.tokens * shape.merge**2
    order, window_ends = geometry.order, geometry.window_ends
    if order is not None and window_ends is not None:
        order = np.concatenate([order, np.arange(len(order), budget.tokens)])
        window_ends = _lengthen(window_ends, budget.windows + 1, window_ends[-1])
    return Geometry(
        positions=_lengthen(geometry.positions, patches, 0),
        ends=_lengthen(geometry.ends, budget.slices + 1, geometry.ends[-1]),
        longest=patches,
        order=order,
        window_ends=window_ends,
        longest_window=min(patches, (shape.window_side * shape.merge) ** 2),
        taps=None if geometry.taps is None else _lengthen(geometry.taps, patches, 0),
        tap_weights=None if geometry.tap_weights is None else _lengthen(geometry.tap_weights, patches, 0),
    )


@lru_cache(maxsize=_SIZES_KEPT)
def _laid(side: Side, shape: TowerShape) -> _Slice:
    return _Slice(side, shape)


class _Slice:
    """One slice's own part, from 0 on. order, windows: tokens by window, and patches in each."""

    def __init__(self, side: Side, shape: TowerShape) -> None:
        rows, columns = side
        merge = shape.merge
        self.patches, self.tokens = rows * columns, rows * columns // merge**2
        # by token, then within it: (2, rows, merge, columns, merge) to (rows, columns, merge, merge, 2)
        places = np.indices(side).reshape(2, rows // merge, merge, columns // merge, merge)
        self.positions = places.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
        if shape.window_side:
            row, column = np.indices((rows // merge, columns // merge)) // shape.window_side
            window = (row * (column.max() + 1) + column).ravel()
            self.order = np.argsort(window, kind="stable")
            self.windows = np.bincount(window) * merge**2
        if shape.table_side:
            (row_taps, row_weights), (column_taps, column_weights) = (
                _axis(self.positions[:, axis], side[axis], shape.table_side) for axis in (0, 1)
            )
            self.taps = (row_taps[:, :, None] * shape.table_side + column_taps[:, None]).reshape(-1, 4)
            self.tap_weights = (row_weights[:, :, None] * column_weights[:, None]).reshape(-1, 4)


def _axis(places: Array, length: int, table_side: int) -> tuple[Array, Array]:
    """The two table entries beside each place of an axis, and their shares: its ends are the table's, the rest linear.

    In float32, in the order in which transformers computes, so that both round alike.
    """
    at = places.astype(np.float32) * np.float32(table_side - 1) / np.float32(max(length - 1, 1))
    below = np.floor(at)
    offsets = np.arange(2)
    weights = 1 - np.abs(at[:, None] - below[:, None] - offsets.astype(np.float32))
    return np.clip(below.astype(np.int64)[:, None] + offsets, 0, table_side - 1), np.maximum(weights, 0)


def _ends(lengths: Sequence[int] | Array) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _lengthen(array: Array, length: int, value: Any) -> Array:
    """More rows, of one value; never fewer."""
    longer = np.full((length, *array.shape[1:]), value, array.dtype)
    longer[: len(array)] = array
    return longer
