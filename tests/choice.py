"""Which tokens `pixel_change` keeps, written a second time: loops over slices, tokens and blocks, in fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

RENEWED_EVERY = 8
DEFAULT_THRESHOLD = Fraction(1, 10)


def chosen_tokens(
    frames: NDArray[np.uint8], grid: tuple[int, int], slice_frames: int, rate: float, threshold: float | None
) -> list[list[int]]:
    """The tokens of each slice.

    frames: [F, H, W, 3]. grid: rows and columns of tokens. slice_frames: of each slice; the last may have fewer.
    """
    rows, columns = grid
    slices = [frames[first : first + slice_frames] for first in range(0, len(frames), slice_frames)]
    side = frames.shape[1] // rows
    changes = [[Fraction(0)] * (rows * columns)] + [
        [change_of_token(before, now, side, row, column) for row in range(rows) for column in range(columns)]
        for before, now in pairwise(slices)
    ]
    least = 255 * (DEFAULT_THRESHOLD if threshold is None else Fraction(str(threshold)))
    num_kept = max(rows * columns, math.floor(len(slices) * rows * columns * (1 - Fraction(str(rate)))))
    if threshold is not None:
        renewed_or_changed = sum(
            t % RENEWED_EVERY == 0 or levels >= least for t, of_slice in enumerate(changes) for levels in of_slice
        )
        num_kept = min(num_kept, renewed_or_changed)
    best = _best(changes, num_kept, least)
    return [[token for t, token in best if t == number] for number in range(len(slices))]


def shown_tokens(
    frames: NDArray[np.uint8], grid: tuple[int, int], slice_frames: int, threshold: float
) -> list[list[int]]:
    """The tokens of each slice after slice 0, which is shown whole, if each is compared with what was last shown."""
    rows, columns = grid
    first, *slices = [frames[start : start + slice_frames] for start in range(0, len(frames), slice_frames)]
    side, levels = frames.shape[1] // rows, 255 * Fraction(str(threshold))
    allowance = Fraction(math.floor(48 * levels / 8), 48)
    references, lasting = [first] * (rows * columns), [Fraction(0)] * (rows * columns)
    shown: list[list[int]] = []
    for now in slices:
        shown.append([])
        for token in range(rows * columns):
            change = change_of_token(references[token], now, side, *divmod(token, columns))
            lasting[token] = max(Fraction(0), lasting[token] + change - allowance)
            if lasting[token] >= levels / 2:
                shown[-1].append(token)
                references[token], lasting[token] = now, Fraction(0)
    return shown


def change_of_token(before: NDArray[np.uint8], now: NDArray[np.uint8], side: int, row: int, column: int) -> Fraction:
    """The largest change of a token's 16 blocks between two slices, in levels."""
    block, largest = side // 4, Fraction(0)
    for down in range(4):
        for across in range(4):
            top, left = row * side + down * block, column * side + across * block
            total = 0
            for channel in range(3):
                means = []
                for frames in (before, now):
                    values = frames[:, top : top + block, left : left + block, channel]
                    means.append(math.floor(Fraction(int(values.sum()) * 16, values.size)))
                total += abs(means[1] - means[0])
            largest = max(largest, Fraction(total, 48))
    return largest


def _best(changes: list[list[Fraction]], num_kept: int, least: Fraction) -> list[tuple[int, int]]:
    """Slices and tokens: those of slice 0, then those that changed by what they count, then slices by their turn."""
    ranked = []
    for t, of_slice in enumerate(changes):
        for token, levels in enumerate(of_slice):
            larger = sum(other > levels or (other == levels and n < token) for n, other in enumerate(of_slice))
            counts = float(levels) / math.sqrt(1 + larger) if levels >= least else 0.0
            ranked.append((t > 0, -counts, _turn(t, len(changes)), t, token))
    return sorted((t, token) for *_, t, token in sorted(ranked)[:num_kept])


def _turn(t: int, slices: int) -> int:
    """The number of a slice with its binary digits reversed."""
    digits = len(f"{slices - 1:b}")
    return int(f"{t:0{digits}b}"[::-1], 2)
