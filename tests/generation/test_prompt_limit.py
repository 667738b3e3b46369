"""A prompt that does not fit is refused with its size and a frame_sampling that would fit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.contract.errors import PromptTooLong
from common.contract.plan import Grid, MediaPlan, Modality, PromptPlan, Run
from common.contract.retention import EVS, VIDCOM2, Pruning
from services.generation.rpc.prompt_limit import PromptLimit

TEXT = 10
TOKEN_SIDE_PX = 28


def none(_: int) -> int:
    return 0


def plan_of(
    *media: tuple[Modality, Grid],
    brought: Sequence[tuple[Modality, Grid]] = (),
    gap: Callable[[int], int] = none,
    step: Fraction = Fraction(1),
) -> PromptPlan:
    """`TEXT` tokens of text, then media of two frames per slice and 28 × 28 pixels per token.

    brought: further media whose embeddings are in the prompt. gap: tokens of text before slice i ≥ 1. step: seconds
    between slices.
    """
    items, offset = [], TEXT

    def runs_of(grid: Grid) -> tuple[Run, ...]:
        nonlocal offset
        runs: list[Run] = []
        for i in range(grid.t):
            offset += gap(i) if i else 0
            runs.append(Run(offset, grid.h * grid.w))
            offset += grid.h * grid.w
        return tuple(runs)

    for modality, grid in media:
        video = modality is Modality.VIDEO
        items.append(
            MediaPlan(
                modality=modality,
                grid=grid,
                runs=runs_of(grid),
                frames=2 * grid.t if video else 1,
                frame_height_px=TOKEN_SIDE_PX * grid.h,
                frame_width_px=TOKEN_SIDE_PX * grid.w,
                seconds_per_grid=step if video else None,
                timestamps_s=(0.0,) * (2 * grid.t) if video else (),
                content_hash=bytes(32),
            )
        )
    for modality, grid in brought:
        base = step if modality is Modality.VIDEO else None
        items.append(MediaPlan(modality, grid, runs_of(grid), 0, 0, 0, base, (), bytes(32)))
    ids = np.zeros(offset, np.int32)
    return PromptPlan(ids, np.tile(ids, (3, 1)), tuple(items), 0, bytes(32))


def kept(grid: Grid, rate: float, modality: Modality, method: str = EVS) -> int:
    if modality is Modality.IMAGE:
        return grid.tokens
    floor = grid.t if method == VIDCOM2 else grid.h * grid.w
    return max(floor, math.floor(grid.tokens * (1 - Fraction(str(rate)))))


def room(limit: int, plan: PromptPlan, pruning: Pruning, max_new_tokens: int | None = None) -> int:
    """Tokens left under a limit if all media are pruned alike."""
    counts = [kept(item.grid, pruning.rate, item.modality, pruning.method) for item in plan.media]
    return PromptLimit(limit).answer_tokens(plan, [pruning] * len(plan.media), counts, max_new_tokens)


def test_the_answer_gets_the_tokens_that_the_pruned_prompt_leaves() -> None:
    plan = plan_of((Modality.VIDEO, Grid(4, 5, 5)))
    half = Pruning(rate=0.5)
    assert room(100, plan, half) == 100 - TEXT - 50
    assert room(100, plan, half, 40) == 40
    assert room(61, plan, half) == 1
    for limit, answer in ((60, None), (100, 41)):
        with pytest.raises(PromptTooLong, match="60 tokens after pruning, 10 of them text"):
            room(limit, plan, half, answer)


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
    method=st.sampled_from([EVS, VIDCOM2]),
    between=st.integers(0, 20),
    limit=st.integers(1, 3000),
)
def test_the_advice_would_fit_and_a_little_more_would_not(
    videos: list[tuple[Modality, Grid]],
    images: list[tuple[Modality, Grid]],
    brought: list[tuple[Modality, Grid]],
    rate: float,
    method: str,
    between: int,
    limit: int,
) -> None:
    media = [*videos, *images]
    plan, pruning = plan_of(*media, brought=brought, gap=lambda _: between), Pruning(rate, method)

    def tokens(max_pixels: int, fps: float) -> int:
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

    present = max(grid.h * grid.w for _, grid in media) * TOKEN_SIDE_PX**2
    needed = tokens(present, 1000) + 1
    if needed <= limit:
        assert room(limit, plan, pruning) == limit - needed + 1
        return
    with pytest.raises(PromptTooLong) as info:
        room(limit, plan, pruning)
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


def gaps_of(total_frames: int, frames: int) -> list[int]:
    """Text tokens before each slice except the first if Qwen3-VL samples `frames` frames of a video of 24 per second.

    Frames are evenly spaced; an odd last one is repeated. The timestamp of a slice is the mean of its two frames'; the
    text before a slice is five tokens plus one per character of the timestamp.
    """
    shown_s = np.linspace(0, total_frames - 1, frames).round() / 24
    slices_s = np.pad(shown_s, (0, frames % 2), mode="edge").reshape(-1, 2).mean(axis=1)
    return [5 + len(f"{time:.1f}") for time in slices_s[1:]]


# At two frames a second all timestamps of 242 frames are below 10.0 s, unless the last frame has a slice of its own.
@pytest.mark.parametrize("total_frames", [242, 1440])
def test_the_advice_counts_the_timestamps_between_slices(total_frames: int) -> None:
    seconds = Fraction(total_frames, 24)
    sampled = int(2 * seconds)
    present = gaps_of(total_frames, sampled)
    grid = Grid(sampled // 2, 1, 1)
    plan = plan_of((Modality.VIDEO, grid), gap=lambda i: present[i - 1], step=seconds / grid.t)
    assert plan.tokens == TEXT + grid.t + sum(present)

    def tokens(frames: int) -> int:
        gaps = gaps_of(total_frames, frames)
        return TEXT + len(gaps) + 1 + sum(gaps)

    for limit in range(TEXT + 1, plan.tokens + 1, 1 if total_frames == 242 else 7):
        with pytest.raises(PromptTooLong, match=rf"has {plan.tokens} tokens .*, {TEXT} of them text") as info:
            room(limit, plan, Pruning())
        assert "of max_pixels" not in str(info.value)
        fps = re.search(r"fps=([\d.]+) and max_pixels", str(info.value))
        if fps:
            assert tokens(max(4, int(seconds * Fraction(fps[1])))) < limit
        else:
            assert tokens(4) + max(present) >= limit


def test_there_is_no_advice_if_the_text_alone_is_too_long() -> None:
    plan = plan_of((Modality.VIDEO, Grid(4, 5, 5)))
    with pytest.raises(PromptTooLong) as info:
        room(TEXT, plan, Pruning())
    assert "would fit" not in str(info.value)


@pytest.mark.parametrize("modality", Modality)
def test_there_is_no_advice_for_embeddings_in_the_prompt(modality: Modality) -> None:
    grid = Grid(1, 5, 20)
    with pytest.raises(PromptTooLong, match=f"the prompt has {TEXT + grid.tokens} tokens") as info:
        room(TEXT + 50, plan_of(brought=[(modality, grid)]), Pruning())
    assert "would fit" not in str(info.value)
