"""The only position formula of the system: positions of the full, unpruned prompt.

All later stages gather or slice these positions; only decoded tokens add `index + delta`, which continues them.
It knows no model family: a family describes its prompt as spans.
Source: Qwen2-VL, arXiv 2409.12191, section 2.1; time scaled by seconds as in Qwen2.5-VL, arXiv 2502.13923.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.errors import PromptTooLong
from gridsieve.common.contract.plan import MAX_POSITION, Grid, Int32Array

Int64Array: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TextSpan:
    """`tokens` text tokens, whose positions count up on all three axes."""

    tokens: int


@dataclass(frozen=True, slots=True)
class GridSpan:
    """A grid of media tokens whose temporal slices are `time_step` positions apart (an image: 0).

    times: the position of each slice from the span's start, in place of a step; not decreasing, the first is 0.
    """

    grid: Grid
    time_step: Fraction
    times: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.grid.tokens


@dataclass(frozen=True, slots=True)
class LinearSpan:
    """`tokens` media tokens of a model with one-dimensional positions, which count up as those of text."""

    tokens: int


MediaSpan: TypeAlias = GridSpan | LinearSpan


def positions_of(spans: Sequence[TextSpan | MediaSpan]) -> Int32Array:
    """Positions of a prompt laid out as `spans`: int32 [3, N], the axes time, height, width.

    A span that starts at p = (maximum over all axes so far) + 1 puts token (i, j, k) of a grid at
    (p + ⌊i · time_step⌋, p + j, p + k), or (p + times[i], p + j, p + k), and token n of another span at p + n on every
    axis.
    Raises PromptTooLong where videos last so long that a position would pass MAX_POSITION.
    """
    parts: list[Int32Array] = []
    start = 0
    for span in spans:
        part = _grid(span) if isinstance(span, GridSpan) else np.broadcast_to(np.arange(span.tokens), (3, span.tokens))
        if not part.size:
            continue
        last = start + int(part.max())
        if last > MAX_POSITION:
            raise PromptTooLong(f"the prompt's videos reach position {last}, at most {MAX_POSITION} is allowed")
        parts.append((part + start).astype(np.int32))
        start = last + 1
    return np.concatenate(parts, axis=1) if parts else np.zeros((3, 0), np.int32)


def _grid(span: GridSpan) -> Int64Array:
    t, h, w = span.grid.t, span.grid.h, span.grid.w
    step = span.time_step
    # Integer arithmetic: in floating point some products land just below an integer and floor one lower.
    steps = span.times or [i * step.numerator // step.denominator for i in range(t)]
    time = np.array(steps, np.int64)
    axes = np.meshgrid(time, np.arange(h), np.arange(w), indexing="ij")
    return np.stack([axis.reshape(-1) for axis in axes])
