"""A prompt that cannot fit is refused with numbers, and with a frame_sampling that would have fitted."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import PromptTooLong
from common.plan import Grid, MediaPlan, Modality, PromptPlan, Run
from common.retention import Pruning
from services.generation.prompt_limit import PromptLimit

TEXT = 10
TOKEN_SIDE_PX = 28


def plan_of(*media: tuple[Modality, Grid]) -> PromptPlan:
    """`TEXT` tokens of text, then media: two frames a slice, one slice a second, 28 × 28 pixels a token."""
    items, offset = [], TEXT
    for modality, grid in media:
        video = modality is Modality.VIDEO
        items.append(
            MediaPlan(
                modality=modality,
                grid=grid,
                runs=(Run(offset, grid.tokens),),
                frames=2 * grid.t if video else 1,
                frame_height_px=TOKEN_SIDE_PX * grid.h,
                frame_width_px=TOKEN_SIDE_PX * grid.w,
                seconds_per_grid=Fraction(1) if video else None,
                timestamps_s=(0.0,) * (2 * grid.t) if video else (),
                content_hash=bytes(32),
            )
        )
        offset += grid.tokens
    ids = np.zeros(offset, np.int32)
    return PromptPlan(ids, np.tile(ids, (3, 1)), tuple(items), 0, bytes(32))


def kept(grid: Grid, rate: float, modality: Modality) -> int:
    if modality is Modality.IMAGE:
        return grid.tokens
    return max(grid.h * grid.w, math.floor(grid.tokens * (1 - Fraction(str(rate)))))


def test_what_is_left_is_the_answers() -> None:
    plan = plan_of((Modality.VIDEO, Grid(4, 5, 5)))
    half = (Pruning(rate=0.5),)
    assert PromptLimit(100).room(plan, half, None) == 100 - TEXT - 50
    assert PromptLimit(100).room(plan, half, 40) == 40
    assert PromptLimit(61).room(plan, half, None) == 1
    for limit, answer in ((60, None), (100, 41)):
        with pytest.raises(PromptTooLong, match="60 tokens after pruning, 10 of them text"):
            PromptLimit(limit).room(plan, half, answer)


grids = st.builds(Grid, st.integers(1, 40), st.integers(1, 12), st.integers(1, 12))
videos = st.lists(st.tuples(st.just(Modality.VIDEO), grids), min_size=1, max_size=2)
images = st.lists(st.tuples(st.just(Modality.IMAGE), grids.map(lambda g: Grid(1, g.h, g.w))), max_size=2)


@given(videos=videos, images=images, rate=st.sampled_from([0.0, 0.3, 0.75, 0.9]), limit=st.integers(1, 3000))
def test_what_is_advised_would_fit_and_a_little_more_would_not(
    videos: list[tuple[Modality, Grid]], images: list[tuple[Modality, Grid]], rate: float, limit: int
) -> None:
    media = [*videos, *images]
    plan, prunings = plan_of(*media), [Pruning(rate=rate)] * len(media)

    def tokens(max_pixels: int, fps: float) -> int:
        total = TEXT
        for modality, grid in media:
            # A frame of so many pixels at most has that many tokens at most, and one at least.
            area = max(1, min(grid.h * grid.w, max_pixels // TOKEN_SIDE_PX**2))
            frames = max(4, math.ceil(Fraction(str(fps)) * grid.t))
            t = min(grid.t, math.ceil(frames / 2)) if modality is Modality.VIDEO else 1
            total += kept(Grid(t, 1, area), rate, modality)
        return total

    present = max(grid.h * grid.w for _, grid in media) * TOKEN_SIDE_PX**2
    needed = tokens(present, 1000) + 1
    if needed <= limit:
        assert PromptLimit(limit).room(plan, prunings, None) == limit - needed + 1
        return
    with pytest.raises(PromptTooLong) as info:
        PromptLimit(limit).room(plan, prunings, None)
    pixels = re.search(r"of max_pixels=(\d+)", str(info.value))
    if pixels:
        assert tokens(int(pixels[1]), 1000) < limit
        assert tokens(int(pixels[1]) + 1, 1000) >= limit
    else:
        assert tokens(TOKEN_SIDE_PX**2, 1000) >= limit
    fps = re.search(r"fps=([\d.]+) and max_pixels=(\d+)", str(info.value))
    if fps:
        assert int(fps[2]) == present
        assert tokens(present, float(fps[1])) < limit
        assert tokens(present, round(float(fps[1]) + 0.01, 2)) >= limit
    else:
        assert tokens(present, 0.01) >= limit


def test_text_that_is_too_long_by_itself_comes_without_advice() -> None:
    plan = plan_of((Modality.VIDEO, Grid(4, 5, 5)))
    with pytest.raises(PromptTooLong) as info:
        PromptLimit(TEXT).room(plan, (Pruning(),), None)
    assert "would fit" not in str(info.value)
