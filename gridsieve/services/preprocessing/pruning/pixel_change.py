"""Chooses the tokens of a video by how much their pixels changed: as many as are asked for, or by a threshold.

    slice        0          1          2          3          4          5
    changes      all new    . . . 90   . . 60 80  . . . .    . . . .    . . . .
    kept of 10   1 1 1 1    . . . 1    . . 1  1   . . . .    1 1 1 .    . . . .
                 the tokens that changed, first              then whole slices, spread over the video

Of the tokens that changed, the largest changes stay. A slice's n-th largest counts 1 / √n, so that a cut leaves tokens
for other events. What remains of the budget renews the picture: slices are completed one after the other, by their
numbers with the bits reversed (of 16 slices 8, 4, 12, 2, …), which spreads any number of them over the video. A tower
that sees only the kept tokens knows most about those of a whole slice.
It knows neither frames nor rates.
Sources: a threshold on the change of a place is Differential Token Drop's, TimeChat-Online, arXiv 2504.17343; the order
is van der Corput's sequence. Shares of slices and renewed slices are Gridsieve's own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.plan import Grid, Int32Array
from gridsieve.services.preprocessing.video.resize import Float32Array

MAX_LEVEL = 255

# Where a threshold alone decides, one of so many slices is whole: a power of two.
RENEWED_EVERY = 8


def changed(changes: Float32Array, number: int, threshold: float) -> Int32Array:
    """The tokens of slice `number` that stay where a threshold alone decides: those that changed, or the whole slice.

    changes: float32 [h·w], in levels, from `change.change`. threshold: a token changed if its change is at least this
    share of 255 levels. Returns int32 [k], increasing; k may be 0.
    """
    if number % RENEWED_EVERY == 0:
        return np.arange(changes.size, dtype=np.int32)
    return np.flatnonzero(changes >= threshold * MAX_LEVEL).astype(np.int32)


def keep(changes: Float32Array, grid: Grid, num_kept: int, threshold: float) -> Int32Array:
    """Indices of the tokens that stay where their number is given.

    changes: float32 [t·h·w], in levels, from `change.change`; +inf in slice 0. num_kept: K, from h·w to t·h·w.
    threshold: as in `changed`.
    Returns int32 [K], strictly increasing; all of slice 0. Ties go to the slice that is renewed earlier, then to the
    earlier token.
    """
    of_slices = changes.reshape(grid.t, grid.slice_tokens).astype(np.float64)
    of_slices[of_slices < threshold * MAX_LEVEL] = 0
    rank = (-of_slices).argsort(axis=1, kind="stable").argsort(axis=1)
    worth = of_slices / np.sqrt(1 + rank)
    turns = np.broadcast_to(_reversed_bits(grid.t)[:, None], worth.shape)
    # Stable, so that tokens of one slice stay in order.
    order = np.lexsort((turns.ravel(), -worth.ravel()))
    return np.sort(order[:num_kept]).astype(np.int32)


def _reversed_bits(count: int) -> NDArray[np.int64]:
    """Of the numbers below `count`, the bits in reverse: int64 [count]."""
    numbers = np.arange(count)
    reverse = np.zeros_like(numbers)
    for _ in range((count - 1).bit_length()):
        reverse = 2 * reverse + numbers % 2
        numbers //= 2
    return reverse
