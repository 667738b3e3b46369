"""The layout of packed slices: positions, sequences and windows of their patches, computed on the host.

    slices:     [ a: 4 × 6 patches ][ b: 4 × 4 ]        sides
    ends:       0                  24         40        sequences of full attention
    order:      [0 1 3 4 | 2 5 || 6 7 8 9]              tokens by window (of 2 × 2 here); the forward reverses it

So the forward reads no number back from the device, and its inputs can be padded to the size of a graph bucket:

    ends:       0   24   40   40   40                   padding is in no sequence, so attention skips it
    order:      [0 … 9 | 10 11 …]                       padding tokens keep their places

Of a slice whose tokens were chosen before the tower, only the kept ones have patches. Each keeps its row, column,
window and table entries; sequences and windows have fewer patches, and empty windows are left out:

    slice:      [ a: 4 × 6 patches, of which tokens 1, 4 and 5 are kept ]
    ends:       0   12
    order:      [0 1 | 2]                               tokens 1 and 4 share a window, 5 is in another one

A slice may be a group of frames, whose patches are sequences of their own:

    slices:     [ a0: 4 × 6 ][ a1: 4 × 6 ][ b: 4 × 4 ]
    ends:       0           24           48         64
    slice_ends: 0                        48         64

Class tokens and registers are rows before the patches of each sequence, whatever is kept of it:

    slice:      [ − − a: 4 × 6 ]                        two such rows
    ends:       0              26
    token_rows: [2 3 … 25]                              the rows that become tokens

It knows numpy alone and no family: what the tower of one family reads besides, its `Table` and its subclass of
`TowerShape` compute, under names of its own. The tests compare towers that read it with transformers', which compute
the same on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from gridsieve.services.encoder.tower.graph_buckets import Size

# Layouts of single slices that are cached, by size: a few hundred bytes per token each.
_CACHED_SIZES = 32

# Of a frame without a time.
UNTIMED = -1

Array: TypeAlias = NDArray[Any]

A = TypeVar("A")
B = TypeVar("B")


class Side(NamedTuple):
    """Rows and columns of a slice, in patches, multiples of merge. times: the numbered time of each of its frames.

    kept: the tokens of the slice whose patches are there, increasing; None: all. still: it is a picture, not frames of
    a video.
    """

    rows: int
    columns: int
    times: tuple[int, ...] = (UNTIMED,)
    kept: tuple[int, ...] | None = None
    still: bool = False


class Table(Protocol):
    """A square table of position embeddings, laid over each frame. Hashable, because layouts are cached by it."""

    def by_row(self, positions: Array, rows: int, columns: int) -> Mapping[str, Array]:
        """What the tower reads of it, for `PackedLayout.by_row`: arrays with an entry for each row of a frame.

        positions: int64 (P, 2), as of `PackedLayout`. rows, columns: of the frame, in patches.
        """


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Sizes of a tower from which its layouts follow. A family whose tower needs more of a layout makes a subclass.

    merge: patches per side of a token. window_side: side of an attention window, in tokens; 0 without windows.
    table: of position embeddings; None: the tower has no table, or needs nothing but positions to read it.
    lead: rows of a slice before its patches, such as a class token. dropped: first rows of a slice that become no
        tokens; as many where merge is above 1. fixed: the sides of every slice, of towers that take no others.
    """

    merge: int
    window_side: int = 0
    table: Table | None = None
    lead: int = 0
    dropped: int = 0
    fixed: Side | None = None

    def rows(self, bucket: Size) -> int:
        """Rows of patches of so many slices with so many tokens."""
        return bucket.tokens * self.merge**2 + bucket.slices * self.dropped

    def tokens(self, sides: Sequence[Side]) -> int:
        """How many tokens the tower makes of these slices. Sizes of buckets count merged patches, whatever it makes."""
        return sum(size_of(side, self).tokens for side in sides)

    def by_row(self, sides: Sequence[Side], rows: Sequence[int]) -> Mapping[str, Array]:
        """For `PackedLayout.by_row`, what depends on more than the size of a frame. rows: of each frame."""
        return {}

    def own_ends(self, sides: Sequence[Side], rows: Sequence[int]) -> Mapping[str, Array]:
        """For `PackedLayout.own_ends`. rows: of each slice."""
        return {}


@dataclass(frozen=True, slots=True)
class PackedLayout(Generic[A]):
    """Layout of P patches in T tokens, F frames, S slices and W windows; None for arrays that a tower does not need.

    positions: int64 (P, 2), row and column; −1 and i of the i-th row before a slice's patches. ends: int32 (F + 1,),
    ends of frames in patches, the longest of which has `longest`. order: int64 (T,), tokens by window. window_ends:
    int32 (W + 1,), ends of windows in patches, the longest of which has `longest_window`. token_rows: int64
    (T · merge²,), the rows that become tokens.
    by_row: arrays (P, …), by the names that the family gives them. own_ends: int32 (S + 1,), likewise.
    """

    positions: A
    ends: A
    longest: int
    order: A | None = None
    window_ends: A | None = None
    longest_window: int = 0
    token_rows: A | None = None
    by_row: Mapping[str, A] = field(default_factory=dict)
    own_ends: Mapping[str, A] = field(default_factory=dict)

    def map(self, change: Callable[[A], B]) -> PackedLayout[B]:
        """A copy with `change` applied to every array."""

        def changed(value: Any) -> Any:
            if value is None or isinstance(value, int):
                return value
            return {name: change(each) for name, each in value.items()} if isinstance(value, Mapping) else change(value)

        return PackedLayout(**{each.name: changed(getattr(self, each.name)) for each in fields(self)})

    def with_ends_of(self, other: PackedLayout[A]) -> PackedLayout[A]:
        """A copy with the ends of sequences from another layout."""
        return replace(self, ends=other.ends, window_ends=other.window_ends, own_ends=other.own_ends)

    @property
    def arrays(self) -> list[A]:
        """All arrays, always in the same order."""
        found: list[A] = []
        self.map(found.append)
        return found


def size_of(side: Side, shape: TowerShape) -> Size:
    """The size of one slice, whose frames are slices of a bucket."""
    if side.kept is not None:
        laid = _laid_side(side, shape)
        return Size(laid.tokens, 1, len(laid.windows) if shape.window_side else 0, laid.tokens)
    rows, columns, frames = side.rows // shape.merge, side.columns // shape.merge, len(side.times)
    windows = -(-rows // shape.window_side) * -(-columns // shape.window_side) if shape.window_side else 0
    tokens = rows * columns + shape.lead - shape.dropped
    return Size(frames * tokens, frames, frames * windows, tokens)


def lay_out(sides: Sequence[Side], shape: TowerShape) -> PackedLayout[Array]:
    """The layout of slices packed end to end. sides: of at least one slice."""
    each_side = [_laid_side(side, shape) for side in sides]
    laid = [each for each, side in zip(each_side, sides, strict=True) for _ in side.times]
    order, window_ends, longest_window = None, None, 0
    if shape.window_side:
        starts = np.cumsum([0, *(each.tokens for each in laid[:-1])])
        order = np.concatenate([each.order + start for each, start in zip(laid, starts, strict=True)])
        lengths = np.concatenate([each.windows for each in laid])
        window_ends, longest_window = ends_of(lengths), int(lengths.max())
    patches = [each.patches for each in laid]
    ends, token_rows = ends_of(patches), None
    if shape.dropped:
        token_rows = np.concatenate([np.arange(a + shape.dropped, b) for a, b in pairwise(ends)])
    slices = [each.patches * len(side.times) for each, side in zip(each_side, sides, strict=True)]
    return PackedLayout(
        positions=np.concatenate([each.positions for each in laid]),
        ends=ends,
        longest=max(patches),
        order=order,
        window_ends=window_ends,
        longest_window=longest_window,
        token_rows=token_rows,
        by_row={
            **{name: np.concatenate([each.by_row[name] for each in laid]) for name in laid[0].by_row},
            **shape.by_row(sides, patches),
        },
        own_ends=shape.own_ends(sides, slices),
    )


def pad(layout: PackedLayout[Array], bucket: Size, shape: TowerShape) -> PackedLayout[Array]:
    """The layout padded to a bucket. The `longest` of it are those of any layout that fits into it."""
    assert (layout.order is None) == (shape.window_side == 0)
    patches, slices = shape.rows(bucket), bucket.slices + 1
    longest = shape.rows(replace(bucket, tokens=bucket.longest, slices=1))
    order = layout.order
    if order is not None:
        order = np.concatenate([order, np.arange(len(order), bucket.tokens)])
    return PackedLayout(
        positions=_lengthen(layout.positions, patches),
        ends=_lengthen_ends(layout.ends, slices),
        longest=longest,
        order=order,
        window_ends=_lengthen_ends(layout.window_ends, bucket.windows + 1),
        longest_window=min(longest, (shape.window_side * shape.merge) ** 2),
        token_rows=_lengthen(layout.token_rows, bucket.tokens * shape.merge**2),
        by_row={name: _lengthen(array, patches) for name, array in layout.by_row.items()},
        own_ends={name: _lengthen_ends(array, slices) for name, array in layout.own_ends.items()},
    )


def _laid_side(side: Side, shape: TowerShape) -> _Frame:
    """The layout of each frame of a slice."""
    whole = _whole(side.rows, side.columns, shape)
    return whole if side.kept is None else whole.only(side.kept)


class _Frame:
    """The layout of one frame. window: of each token. order: tokens by window. windows: patches in each window.

    positions, by_row: as of `PackedLayout`.
    """

    def __init__(self, rows: int, columns: int, shape: TowerShape) -> None:
        merge = shape.merge
        self.patches, self.tokens = shape.lead + rows * columns, rows * columns // merge**2
        # by token, then within it: (2, rows, merge, columns, merge) to (rows, columns, merge, merge, 2)
        places = np.indices((rows, columns)).reshape(2, rows // merge, merge, columns // merge, merge)
        by_patch = places.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
        before = np.stack([np.full(shape.lead, -1), np.arange(shape.lead)], axis=1)
        self.positions = np.concatenate([before, by_patch])
        self.by_row: Mapping[str, Array] = {}
        if shape.window_side:
            row, column = np.indices((rows // merge, columns // merge)) // shape.window_side
            self.window = (row * (column.max() + 1) + column).ravel()
            self.order = np.argsort(self.window, kind="stable")
            self.windows = np.bincount(self.window) * merge**2
        if shape.table is not None:
            self.by_row = shape.table.by_row(self.positions, rows, columns)
        self._shape = shape

    def only(self, kept: Sequence[int]) -> _Frame:
        """The layout of the rows before the patches and of these tokens, increasing."""
        shape, tokens = self._shape, np.array(kept, np.int64)
        frame = copy(self)
        patches = (tokens[:, None] * shape.merge**2 + np.arange(shape.merge**2)).ravel()
        rows = np.concatenate([np.arange(shape.lead), shape.lead + patches])
        frame.tokens, frame.patches = len(tokens), len(rows)
        frame.positions = self.positions[rows]
        frame.by_row = {name: array[rows] for name, array in self.by_row.items()}
        if shape.window_side:
            window = self.window[tokens]
            frame.order = np.argsort(window, kind="stable")
            found = np.bincount(window)
            frame.windows = found[found > 0] * shape.merge**2
        return frame


_whole = lru_cache(maxsize=_CACHED_SIZES)(_Frame)


def ends_of(lengths: Sequence[int] | Array) -> Array:
    """Ends of sequences of these lengths, from 0 on: int32 (S + 1,)."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def _lengthen(array: Array | None, length: int, value: object = 0) -> Any:
    """Appends rows of one value up to `length` rows; None for a layout without such an array."""
    if array is None:
        return None
    longer = np.full((length, *array.shape[1:]), value, array.dtype)
    longer[: len(array)] = array
    return longer


def _lengthen_ends(ends: Array | None, length: int) -> Any:
    """Appends empty sequences up to `length` ends."""
    return None if ends is None else _lengthen(ends, length, ends[-1])
