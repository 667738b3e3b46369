"""A prompt that does not fit is refused with its size and a frame_sampling that would fit."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridsieve.common.contract.errors import PromptTooLong
from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, PromptPlan, Run
from gridsieve.common.contract.retention import BY_SLICE, EVS, EVS_CAUSAL, VCAST, VIDCOM2, ItemPruning
from gridsieve.services.generation.request.prompt_limit import PromptLimit

TEXT = 10
TOKEN_SIDE_PX = 28


def plan_of(
    *media: tuple[Modality, Grid], brought: Sequence[tuple[Modality, Grid]] = (), gap: int = 0, fixed: bool = False
) -> PromptPlan:
    """`TEXT` tokens of text, then media of two frames per slice and 28 × 28 pixels per token, a slice per second.

    brought: further media whose embeddings are in the prompt. gap: tokens of text between slices. fixed: tokens do not
    follow max_pixels.
    """
    items, offset = [], TEXT
    for number, (modality, grid) in enumerate((*media, *brought)):
        video, frames = modality is Modality.VIDEO, 0
        runs = tuple(Run(offset + i * (grid.slice_tokens + gap), grid.slice_tokens) for i in range(grid.t))
        offset = runs[-1].end
        if number < len(media):
            frames = 2 * grid.t if video else 1
        items.append(
            MediaPlan(
                modality=modality,
                grid=grid,
                runs=runs,
                frames=FrameShape(frames, (TOKEN_SIDE_PX * grid.h, TOKEN_SIDE_PX * grid.w)) if frames else FrameShape(),
                seconds_per_grid=Fraction(1) if video else None,
                timestamps_s=(0.0,) * frames if video else (),
                content_hash=bytes(32),
                fixed_tokens=fixed,
            )
        )
    ids = np.zeros(offset, np.int32)
    return PromptPlan(ids, np.tile(ids, (3, 1)), tuple(items), 0, bytes(32))


def kept(grid: Grid, rate: float, modality: Modality, method: str = EVS) -> int:
    if modality is Modality.IMAGE:
        return grid.tokens
    if method == EVS_CAUSAL:
        return grid.h * grid.w + (grid.t - 1) * max(1, math.floor(grid.h * grid.w * (1 - Fraction(str(rate)))))
    floor = grid.t if method in BY_SLICE else grid.h * grid.w
    return max(floor, math.floor(grid.tokens * (1 - Fraction(str(rate)))))


def room(
    limit: int, plan: PromptPlan, pruning: ItemPruning, max_new_tokens: int | None = None, context: int | None = None
) -> int:
    """Tokens left under a limit, and before pruning under the context, if all media are pruned alike."""
    counts = [kept(item.grid, pruning.rate, item.modality, pruning.method) for item in plan.media]
    return PromptLimit(limit, context).answer_tokens(plan, [pruning] * len(plan.media), counts, max_new_tokens)


def test_the_answer_gets_the_tokens_that_the_pruned_prompt_leaves() -> None:
    plan = plan_of((Modality.VIDEO, Grid(4, 5, 5)))
    half = ItemPruning(rate=0.5)
    assert room(100, plan, half) == 100 - TEXT - 50
    assert room(100, plan, half, 40) == 40
    assert room(61, plan, half) == 1
    for limit, answer in ((60, None), (100, 41)):
        with pytest.raises(PromptTooLong, match="60 tokens after pruning, 10 of them text"):
            room(limit, plan, half, answer)
    with pytest.raises(PromptTooLong, match=f"limit of {TEXT} tokens$"):  # without advice: the text alone is too long
        room(TEXT, plan, half)


def test_no_max_pixels_is_advised_where_tokens_do_not_follow_it() -> None:
    plan = plan_of((Modality.VIDEO, Grid(20, 1, 8)), (Modality.IMAGE, Grid(1, 9, 8)), fixed=True)
    with pytest.raises(PromptTooLong) as info:
        room(TEXT + 72 + 5 * 8 + 1, plan, ItemPruning(), 1)
    # Five slices of two frames, one slice a second: at 0.51 frames a second the video has 11.
    assert str(info.value).endswith("; frame_sampling.fps 0.5 would fit")
    with pytest.raises(PromptTooLong, match=r"tokens$"):  # without advice: the image can have no fewer
        room(TEXT + 72, plan, ItemPruning())


grids = st.builds(Grid, st.integers(1, 40), st.integers(1, 12), st.integers(1, 12))
videos = st.lists(st.tuples(st.just(Modality.VIDEO), grids), min_size=1, max_size=2)
images = st.lists(st.tuples(st.just(Modality.IMAGE), grids.map(lambda g: Grid(1, g.h, g.w))), max_size=2)
brought = st.lists(st.tuples(st.just(Modality.VIDEO), grids), max_size=1)


@settings(max_examples=60)
@given(
    videos=videos,
    images=images,
    brought=brought,
    rate=st.sampled_from([0.0, 0.3, 0.75, 0.9]),
    method=st.sampled_from([EVS, EVS_CAUSAL, VIDCOM2, VCAST]),
    between=st.integers(0, 20),
    limit=st.integers(1, 3000),
    context=st.none() | st.integers(1, 6000),
)
def test_the_advice_would_fit_and_a_little_more_would_not(
    videos: list[tuple[Modality, Grid]],
    images: list[tuple[Modality, Grid]],
    brought: list[tuple[Modality, Grid]],
    rate: float,
    method: str,
    between: int,
    limit: int,
    context: int | None,
) -> None:
    media = [*videos, *images]
    plan, pruning = plan_of(*media, brought=brought, gap=between), ItemPruning(rate, method)

    def tokens(max_pixels: int, fps: float, rate: float = rate) -> int:
        # Embeddings in the prompt cannot shrink.
        total = TEXT + sum(kept(grid, rate, modality, method) + between * (grid.t - 1) for modality, grid in brought)
        for modality, grid in media:
            # A frame has at least one token.
            area = max(1, min(grid.h * grid.w, max_pixels // TOKEN_SIDE_PX**2))
            frames = max(4, math.ceil(Fraction(str(fps)) * grid.t))
            t = min(grid.t, math.ceil(frames / 2)) if modality is Modality.VIDEO else 1
            # One gap more than needed, unless there are as many slices as now.
            total += kept(Grid(t, 1, area), rate, modality, method) + between * min(t, grid.t - 1)
        return total

    def fit(max_pixels: int, fps: float) -> bool:
        return tokens(max_pixels, fps) < limit and (context is None or tokens(max_pixels, fps, 0.0) < context)

    present = max(grid.h * grid.w for _, grid in media) * TOKEN_SIDE_PX**2
    if fit(present, 1000):
        spare = limit - tokens(present, 1000)
        whole = math.inf if context is None else context - tokens(present, 1000, 0.0)
        assert room(limit, plan, pruning, context=context) == min(spare, whole)
        return
    with pytest.raises(PromptTooLong) as info:
        room(limit, plan, pruning, context=context)
    pixels = re.search(r"; frame_sampling.max_pixels (\d+)", str(info.value))
    if pixels:
        assert fit(int(pixels[1]), 1000)
        assert not fit(int(pixels[1]) + 1, 1000)
    else:
        assert not fit(TOKEN_SIDE_PX**2, 1000)
    fps = re.search(r"fps ([\d.]+) and frame_sampling.max_pixels (\d+)", str(info.value))
    if fps:
        assert int(fps[2]) == present
        assert fit(present, float(fps[1]))
        assert not fit(present, round(float(fps[1]) + 0.01, 2))
    else:
        assert not fit(present, 0.01)
