"""The tokens that the pixels of a video choose, compared with loops over blocks, slices and tokens."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from framesieve.common.contract.plan import Grid
from framesieve.services.preprocessing.pruning.change import block_means, change
from framesieve.services.preprocessing.pruning.choice import keep, num_changed

CHANGED_LEVELS = 24
RENEWED_EVERY = 8
FRAMES = 2

GRIDS = st.builds(Grid, st.integers(1, 20), st.integers(1, 3), st.integers(1, 2))
SEEDS = st.integers(0, 2**32 - 1)


def clip_of(grid: Grid, token_px: int, seed: int) -> NDArray[np.uint8]:
    """Still frames into which bright squares of a block, and now and then a whole new picture, come."""
    rng = np.random.default_rng(seed)
    height, width = grid.h * token_px, grid.w * token_px
    frames = np.empty((FRAMES * grid.t, height, width, 3), np.uint8)
    picture = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    for frame in frames:
        if rng.random() < 0.1:
            picture = rng.integers(0, 256, picture.shape, dtype=np.uint8)
        if rng.random() < 0.4:
            picture = picture.copy()
            top, left = rng.integers(0, height - 4), rng.integers(0, width - 4)
            picture[top : top + 9, left : left + 9] = 40 * rng.integers(0, 7)
        frame[:] = picture
    return frames


def scored(frames: NDArray[np.uint8], token_px: int) -> NDArray[np.float32]:
    """As a decoding worker does it: slice by slice."""
    means = [block_means(frames[first : first + FRAMES], token_px) for first in range(0, len(frames), FRAMES)]
    first = np.full((frames.shape[1] // token_px) * (frames.shape[2] // token_px), np.inf, np.float32)
    return np.concatenate([first, *(change(*pair) for pair in zip(means[1:], means[:-1], strict=True))])


def change_of_token(frames: NDArray[np.uint8], token_px: int, t: int, row: int, column: int) -> Fraction:
    """The largest change of its 16 blocks, in levels."""
    side = token_px // 4
    largest = Fraction(0)
    for down in range(4):
        for across in range(4):
            top, left = row * token_px + down * side, column * token_px + across * side
            total = 0
            for channel in range(3):
                now, before = (
                    math.floor(
                        Fraction(int(frames[FRAMES * s :][:FRAMES, top:, left:, channel][:, :side, :side].sum()))
                        * 16
                        / (FRAMES * side * side)
                    )
                    for s in (t, t - 1)
                )
                total += abs(now - before)
            largest = max(largest, Fraction(total, 48))
    return largest


def turn(t: int, slices: int) -> int:
    """The number of a slice with its binary digits reversed."""
    digits = len(f"{slices - 1:b}")
    return int(f"{t:0{digits}b}"[::-1], 2)


def chosen(changes: list[list[Fraction]], num_kept: int) -> list[int]:
    """Token by token: those of slice 0, then those that changed by what they count, then slices by their turn."""
    ranked = []
    for t, of_slice in enumerate(changes):
        for token, levels in enumerate(of_slice):
            larger = sum(other > levels or (other == levels and n < token) for n, other in enumerate(of_slice))
            counts = float(levels) / math.sqrt(1 + larger) if levels >= CHANGED_LEVELS else 0.0
            index = t * len(of_slice) + token
            ranked.append((t > 0, -counts, turn(t, len(changes)), index))
    return sorted(index for *_, index in sorted(ranked)[:num_kept])


@given(grid=GRIDS, token_px=st.sampled_from([28, 32]), seed=SEEDS, share=st.floats(0, 1))
def test_the_kept_tokens_are_those_of_a_loop_over_tokens(grid: Grid, token_px: int, seed: int, share: float) -> None:
    frames = clip_of(grid, token_px, seed)
    scores = scored(frames, token_px)
    expected = [[Fraction(0)] * grid.slice_tokens] + [
        [change_of_token(frames, token_px, t, row, column) for row in range(grid.h) for column in range(grid.w)]
        for t in range(1, grid.t)
    ]
    num_kept = grid.slice_tokens + round(share * (grid.tokens - grid.slice_tokens))
    assert keep(scores, grid, num_kept).tolist() == chosen(expected, num_kept)
    assert num_changed(scores, grid) == sum(
        t % RENEWED_EVERY == 0 or levels >= CHANGED_LEVELS for t, of_slice in enumerate(expected) for levels in of_slice
    )


@given(grid=GRIDS, seed=SEEDS)
def test_the_automatic_rate_keeps_all_that_changed_and_every_eighth_slice(grid: Grid, seed: int) -> None:
    scores = scored(clip_of(grid, 28, seed), 28)
    slices = np.arange(grid.tokens) // grid.slice_tokens
    wanted = np.flatnonzero((scores >= CHANGED_LEVELS) | (slices % RENEWED_EVERY == 0))
    assert keep(scores, grid, num_changed(scores, grid)).tolist() == wanted.tolist()


def test_a_slice_of_one_frame_equals_one_in_which_it_is_repeated() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (1, 56, 84, 3), dtype=np.uint8)
    changes = change(block_means(frame, 28), block_means(np.repeat(frame, 2, axis=0), 28))
    assert changes.tolist() == [0.0] * 6
