"""The tokens that the pixels of a video choose, compared with loops over blocks, slices and tokens."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import chain

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, Run
from gridsieve.common.contract.retention import ItemPruning, chosen_before_tower
from gridsieve.services.preprocessing.pruning.change import block_means, change
from gridsieve.services.preprocessing.pruning.choice import TokenChoice
from gridsieve.services.preprocessing.video.resize import FrameArray
from gridsieve.services.preprocessing.video.slices import Slice
from tests.choice import chosen_tokens

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


def chosen_of(frames: FrameArray, grid: Grid, pruning: ItemPruning, held: int, repaired: int) -> list[int]:
    """The kept tokens of the whole video, whose pixels are compared with the frames'.

    held: there is room for the pixels of so many slices. repaired: of the first slice's frames.
    """
    side, found = frames.shape[1] // grid.h, list[int]()
    plan = MediaPlan(
        modality=Modality.VIDEO,
        grid=grid,
        runs=(Run(0, grid.tokens),),
        frames=FrameShape(len(frames), (frames.shape[1], frames.shape[2])),
        seconds_per_grid=Fraction(1),
        timestamps_s=(),
        content_hash=bytes(32),
    )
    wholes = [
        Slice(first, frames[first : first + FRAMES], 0 if first else repaired, 0.0, 0.0, 0, 0)
        for first in range(0, len(frames), FRAMES)
    ]
    choice = TokenChoice(plan, pruning)
    ready = [choice.take(whole, holds=number <= held) for number, whole in enumerate(wholes)]
    numbers = choice.choose()
    again = [replace(wholes[number], first_frame=FRAMES * place) for place, number in enumerate(numbers)]
    made = [*filter(None, ready), *choice.rest(), *chain.from_iterable(map(choice.rest, again))]
    assert [each.first_frame for each in made] == [each.first_frame for each in wholes]
    if not all(ready):
        lacking = [n for n, each in enumerate(made) if n > held and each.kept is not None and each.kept.size]
        # What replaces a damaged frame depends on the frames around it, so that all are decoded again.
        assert list(numbers) == (list(range(grid.t)) if lacking and repaired else lacking)
    for each in made:
        assert each.kept is not None
        assert each.pixels.shape == (FRAMES, each.kept.size * side, side, 3)
        for place, token in enumerate(each.kept.tolist()):
            row, column = divmod(token, grid.w)
            square = frames[each.first_frame :][:FRAMES, row * side :, column * side :][:, :side, :side]
            assert np.array_equal(each.pixels[:, place * side : (place + 1) * side], square)
        found += [each.first_frame // FRAMES * grid.slice_tokens + token for token in each.kept.tolist()]
    return found


@settings(max_examples=30)
@given(
    grid=GRIDS,
    token_px=st.sampled_from([28, 32]),
    seed=SEEDS,
    rate=st.sampled_from([0.0, 0.3, 0.5, 0.75, 0.9]),
    threshold=st.sampled_from([None, 0.0, 0.1, 0.4]),
    held=st.sampled_from([0, 3, 20]),
    repaired=st.integers(0, 1),
)
def test_the_kept_tokens_are_those_of_loops_over_blocks_slices_and_tokens(
    grid: Grid, token_px: int, seed: int, rate: float, threshold: float | None, held: int, repaired: int
) -> None:
    pruning = ItemPruning(rate, "pixel_change", threshold=threshold)
    if not chosen_before_tower(grid, pruning, Modality.VIDEO):
        return
    frames = clip_of(grid, token_px, seed)
    expected = chosen_tokens(frames, (grid.h, grid.w), FRAMES, rate, threshold)
    assert chosen_of(frames, grid, pruning, held, repaired) == [
        t * grid.slice_tokens + token for t, tokens in enumerate(expected) for token in tokens
    ]


def test_a_slice_of_one_frame_equals_one_in_which_it_is_repeated() -> None:
    frame = np.random.default_rng(0).integers(0, 256, (1, 56, 84, 3), dtype=np.uint8)
    changes = change(block_means(frame, 28), block_means(np.repeat(frame, 2, axis=0), 28))
    assert changes.tolist() == [0.0] * 6


def test_equal_changes_go_to_the_slice_that_is_renewed_earlier() -> None:
    """The example of docs/pruning.md: A A B B A A B B, of which two slices stay."""
    shown = np.repeat([0, 0, 40, 40, 0, 0, 40, 40], FRAMES).astype(np.uint8)
    frames = np.broadcast_to(shown[:, None, None, None], (shown.size, 28, 28, 3))
    assert chosen_of(frames, Grid(8, 1, 1), ItemPruning(0.68, "pixel_change"), held=8, repaired=0) == [0, 4]
