"""V-CAST against an independent implementation in float64 NumPy, in loops."""

from __future__ import annotations

import itertools
import math
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from numpy.typing import NDArray

from gridsieve.common.contract.plan import Grid
from gridsieve.services.encoder.pruning.vcast import vcast_scores
from tests.encoder.kept import RATES, check_kept, exact_count, keep_by_slice, videos

# Float32 errors: of a cosine and a share of a range; of a curvature.
SCORE_ERROR = 5e-6
CURVATURE_ERROR = 1e-6

Doubles: TypeAlias = NDArray[np.float64]


def unit(vector: Doubles) -> Doubles:
    length = math.sqrt(vector @ vector)
    return vector / length if length > 1e-12 else np.zeros_like(vector)


def exact_scores(embeds: NDArray[np.float32], grid: Grid) -> tuple[Doubles, list[Doubles]]:
    """Of each token (t, h·w), −inf if it is not finite; and each slice's unit mean."""
    slices = embeds.astype(np.float64).reshape(grid.t, grid.h * grid.w, -1)
    scores, means = np.full(slices.shape[:2], -np.inf), []
    for i, tokens in enumerate(slices):
        finite = [bool(np.isfinite(token).all()) for token in tokens]
        zeroed = [token if good else np.zeros_like(token) for token, good in zip(tokens, finite, strict=True)]
        mean = unit(np.mean(zeroed, axis=0))
        means.append(mean)
        lengths = [math.sqrt(token @ token) for token, good in zip(zeroed, finite, strict=True) if good]
        for place, token in enumerate(zeroed):
            if finite[place]:
                spread = max(lengths) - min(lengths)
                longer = (math.sqrt(token @ token) - min(lengths)) / spread if spread else 0.0
                scores[i, place] = 1 - unit(token) @ mean + longer
    return scores, means


def exact_curvature(means: list[Doubles]) -> list[float]:
    steps = [after - before for before, after in itertools.pairwise(means)]
    found = [1.0] * len(means)
    for i in range(1, len(means) - 1):
        if min(math.sqrt(step @ step) for step in steps[i - 1 : i + 1]) >= 2**-10:
            found[i] = 1 - unit(steps[i - 1]) @ unit(steps[i])
    return found


def exact_budgets(curvature: list[float], slice_tokens: int, count: int) -> list[int]:
    """One token a slice; the rest by shares, where full slices leave theirs to the others; largest remainders."""
    weights = [math.exp(each / 0.7) for each in curvature]
    full: set[int] = set()
    while True:
        rest = count - len(weights) - len(full) * (slice_tokens - 1)
        open_ = [i for i in range(len(weights)) if i not in full]
        total = sum(weights[i] for i in open_)
        shares = {i: rest * weights[i] / total for i in open_}
        over = {i for i in open_ if shares[i] > slice_tokens - 1 + 1e-9}
        if not over:
            break
        full |= over
    quotas = [float(slice_tokens) if i in full else 1 + shares[i] for i in range(len(weights))]
    # 1e-9: a quota that is whole up to rounding is whole.
    budgets = [math.floor(quota + 1e-9) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: (-round(quotas[i] - budgets[i], 9), i))
    for i in by_remainder[: count - sum(budgets)]:
        budgets[i] += 1
    return budgets


def settled_budgets(curvature: list[float], slice_tokens: int, count: int) -> list[int] | None:
    """None if the float32 error of one slice could move a token to another."""
    outcomes = {
        tuple(exact_budgets([*curvature[:i], curvature[i] + shift, *curvature[i + 1 :]], slice_tokens, count))
        for i in range(len(curvature))
        for shift in (-CURVATURE_ERROR, 0, CURVATURE_ERROR)
    }
    return [*outcomes.pop()] if len(outcomes) == 1 else None


def check_video(embeds: NDArray[np.float32], grid: Grid, rate: float) -> bool:
    """Checks the kept tokens, and the budgets unless they depend on rounding; returns whether it did the latter."""
    slices = keep_by_slice(embeds, grid, rate, "vcast")
    scores, means = exact_scores(embeds, grid)
    budgets = settled_budgets(exact_curvature(means), grid.slice_tokens, exact_count(grid, rate, grid.t))
    if budgets:
        assert [places.size for places in slices] == budgets
    for places, of_slice in zip(slices, scores, strict=True):
        check_kept(places, of_slice, places.size, SCORE_ERROR)
    return budgets is not None


@settings(max_examples=60)
@given(videos(), RATES)
def test_kept_tokens_follow_the_definition(video: tuple[NDArray[np.float32], Grid], rate: float) -> None:
    check_video(*video, rate)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.8, 0.95])
def test_budgets_of_slices_follow_the_definition(rate: float) -> None:
    settled = 0
    for seed in range(8):
        random = np.random.default_rng(seed)
        # Means that go straight on, bend and turn back.
        course = np.cumsum(random.standard_normal((12, 1, 16)) * random.uniform(0, 0.5, (12, 1, 1)), axis=0)
        embeds = random.standard_normal((12, 30, 16)) + 1 + course
        settled += check_video(embeds.reshape(-1, 16).astype(np.float32), Grid(12, 5, 6), rate)
    assert settled > 5


def test_one_slice_two_slices_and_a_still_picture_share_equally() -> None:
    picture = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    for t in (1, 2, 8):
        # The same picture as another batch would round it.
        noise = 1 + 1e-6 * torch.randn(t, 20, 64, generator=torch.Generator().manual_seed(1))
        slices = keep_by_slice((picture * noise).view(-1, 64), Grid(t, 4, 5), 0.5, "vcast")
        assert [places.tolist() for places in slices] == [slices[0].tolist()] * t
        assert slices[0].size == 10


def test_values_that_are_not_finite_or_overflow_are_dropped_first() -> None:
    embeds = torch.randn(2 * 6, 8, generator=torch.Generator().manual_seed(4))
    embeds[1, 3], embeds[4, 0], embeds[8, 7] = torch.nan, torch.inf, -torch.inf
    embeds[9] = embeds[10] = 3e38  # their sum overflows
    slices = keep_by_slice(embeds, Grid(2, 2, 3), 0.34, "vcast")
    assert slices[0].tolist() == [0, 2, 3, 5]
    assert slices[1].size == 3
    assert not {2, 3} & set(slices[1].tolist())
    for scores in vcast_scores(embeds, Grid(2, 2, 3)):
        assert not scores.isnan().any()


@pytest.mark.parametrize("value", [0.0, torch.nan])
def test_a_slice_without_any_direction_keeps_its_first_tokens(value: float) -> None:
    embeds = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(5))
    embeds[1] = value
    slices = keep_by_slice(embeds.view(-1, 8), Grid(4, 2, 3), 0.5, "vcast")
    assert slices[1].tolist() == list(range(slices[1].size))
