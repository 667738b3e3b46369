"""Which tokens are chosen before the tower, written a second time from whole frames. The scores are the service's."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from framesieve.services.preprocessing.pruning.pixel_change import scores


def chosen_tokens(
    frames: NDArray[np.uint8], grid: tuple[int, int], slice_frames: int, rate: float, threshold: float | None
) -> Iterator[list[int]]:
    """The tokens of each slice: all of the first, of each other the ⌊h·w·(1 − rate)⌋ best that reach the threshold.

    frames: [F, H, W, 3]. grid: rows and columns of tokens.
    """
    tokens, before = grid[0] * grid[1], None
    count = max(1, math.floor(tokens * (1 - Fraction(str(rate)))))
    for start in range(0, len(frames), slice_frames):
        now, kept = frames[start : start + slice_frames], list(range(tokens))
        if before is not None:
            changed = [float(each) for each in scores(before, now, frames.shape[1] // grid[0])]
            best = sorted(kept, key=lambda token: (-changed[token], token))[:count]
            kept = sorted(token for token in best if threshold is None or changed[token] >= threshold)
        yield kept
        before = now
