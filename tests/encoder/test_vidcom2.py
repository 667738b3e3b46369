"""VidCom2 against an independent implementation in float64 NumPy, in loops."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gridsieve.common.contract.plan import Grid
from gridsieve.services.encoder.pruning.vidcom2 import slice_budgets
from tests.encoder.kept import RATES, check_kept, exact_count, keep_by_slice, videos

# Float32 errors: of a sum of ten Gaussians of distances between unit vectors, and of its mean over a slice.
SCORE_ERROR = 5e-6
MEAN_ERROR = 3e-6

Doubles: TypeAlias = NDArray[np.float64]


def unit_tokens(embeds: NDArray[np.float32], grid: Grid) -> tuple[Doubles, NDArray[np.bool_]]:
    """Unit tokens (t, h·w, D/2) of the channels with the least variance, and which are finite; others are zeros."""
    tokens = embeds.astype(np.float64)
    finite = np.isfinite(tokens).all(1)
    tokens[~finite] = 0
    variances = [float(np.mean((channel - channel.mean()) ** 2)) for channel in tokens.T]
    channels = sorted(range(len(variances)), key=lambda channel: (variances[channel], channel))[: len(variances) // 2]
    chosen = tokens[:, channels]
    units = np.array([token / max(math.sqrt(token @ token), 1e-12) for token in chosen])
    return units.reshape(grid.t, grid.h * grid.w, -1), finite.reshape(grid.t, grid.h * grid.w)


def likeness(token: Doubles, centre: Doubles) -> float:
    distance = float((token - centre) @ (token - centre))
    return sum(math.exp(-distance / (2 * width)) for width in (1 / 8, 1 / 4, 1 / 2, 1, 2))


def exact_similarities(embeds: NDArray[np.float32], grid: Grid) -> tuple[Doubles, Doubles]:
    """Of each token to its video, and the sum for video and slice, (t, h·w) each; +inf for tokens not finite."""
    units, finite = unit_tokens(embeds, grid)
    centre = units.reshape(-1, units.shape[2]).mean(0)
    to_video = np.array([[likeness(token, centre) for token in piece] for piece in units])
    to_slice = np.array([[likeness(token, piece.mean(0)) for token in piece] for piece in units])
    return to_video, np.where(finite, to_video + to_slice, np.inf)


def exact_quotas(to_video: Doubles, rate: float) -> list[float]:
    standing_out = [-float(piece.mean()) for piece in to_video]
    weights = [math.exp((each - max(standing_out)) / 0.01) for each in standing_out]
    shares = [weight / sum(weights) for weight in weights]
    return [min(1.0, (1 - rate) * (1 + share - sum(shares) / len(shares))) * to_video.shape[1] for share in shares]


def exact_budgets(quotas: list[float], slice_tokens: int, count: int) -> list[int]:
    """Moves one token at a time: to the largest remainder that has had the fewest, or from the smallest."""
    clipped = [min(max(quota, 1.0), float(slice_tokens)) for quota in quotas]
    budgets = [math.floor(quota) for quota in clipped]
    remainders = [quota - budget for quota, budget in zip(clipped, budgets, strict=True)]
    moved = [0] * len(quotas)
    while sum(budgets) < count:
        slices = [i for i in range(len(quotas)) if budgets[i] < slice_tokens]
        i = min(slices, key=lambda i: (moved[i], -remainders[i], i))
        budgets[i], moved[i] = budgets[i] + 1, moved[i] + 1
    while sum(budgets) > count:
        slices = [i for i in range(len(quotas)) if budgets[i] > 1]
        i = min(slices, key=lambda i: (moved[i], remainders[i], -i))
        budgets[i], moved[i] = budgets[i] - 1, moved[i] + 1
    return budgets


def depends_on_rounding(to_video: Doubles, rate: float, count: int) -> bool:
    """Whether the float32 error of one slice could move a token to another slice."""
    shifts = [np.zeros(len(to_video)), *(sign * row for row in np.eye(len(to_video)) for sign in (-1, 1))]
    outcomes = {
        tuple(exact_budgets(exact_quotas(to_video + MEAN_ERROR * shift[:, None], rate), to_video.shape[1], count))
        for shift in shifts
    }
    return len(outcomes) > 1


def check_video(embeds: NDArray[np.float32], grid: Grid, rate: float) -> bool:
    """Checks the kept tokens, and the budgets unless they depend on rounding; returns whether it did the latter."""
    slices, count = keep_by_slice(embeds, grid, rate, "vidcom2"), exact_count(grid, rate, grid.t)
    to_video, to_both = exact_similarities(embeds, grid)
    settled = not depends_on_rounding(to_video, rate, count)
    if settled:
        budgets = exact_budgets(exact_quotas(to_video, rate), grid.slice_tokens, count)
        assert [places.size for places in slices] == budgets
    for places, similarities in zip(slices, to_both, strict=True):
        check_kept(places, -similarities, places.size, SCORE_ERROR)
    return settled


@settings(max_examples=60)
@given(videos(), RATES)
def test_kept_tokens_follow_the_definition(video: tuple[NDArray[np.float32], Grid], rate: float) -> None:
    check_video(*video, rate)


def test_budgets_of_slices_follow_the_definition() -> None:
    settled = 0
    for seed in range(0, 20, 2):
        random = np.random.default_rng(seed)
        # Slices so similar that none gets all tokens.
        embeds = random.standard_normal((6 * 100, 16)) + 0.6 * random.standard_normal(16)
        settled += check_video(embeds.astype(np.float32), Grid(6, 10, 10), 0.05 + 0.04 * seed)
    assert settled > 7


def test_rounding_noise_of_a_still_picture_does_not_break_ties() -> None:
    random = torch.Generator().manual_seed(0)
    pixels = torch.randn(5, 64, generator=random).repeat_interleave(4, 0)
    noise = 1 + 1e-7 * torch.randn(8, 20, 64, generator=random)
    slices = keep_by_slice((pixels * noise).view(-1, 64), Grid(8, 4, 5), 0.5, "vidcom2")
    # Each colour has four tokens, of which the first ones are kept.
    for places in slices:
        for colour in range(5):
            of_colour = [place % 4 for place in places.tolist() if place // 4 == colour]
            assert of_colour == list(range(len(of_colour)))


def test_values_that_are_not_finite_or_overflow_are_dropped_first() -> None:
    embeds = 1 + torch.rand(3 * 6, 8, generator=torch.Generator().manual_seed(4))
    embeds[1, 3], embeds[4, 0], embeds[8, 7] = torch.nan, torch.inf, -torch.inf
    embeds[9] = embeds[10] = 3e38  # their sum overflows
    embeds[14] = 1e20  # its length does
    slices = keep_by_slice(embeds, Grid(3, 2, 3), 0.5, "vidcom2")
    for places, lost in zip(slices, ({1, 4}, {2, 3, 4}, {2}), strict=True):
        assert not lost & set(places.tolist()) or set(range(6)) - lost <= set(places.tolist())


@st.composite
def budget_cases(draw: st.DrawFn) -> tuple[list[float], int, int]:
    slice_tokens = draw(st.integers(1, 12))
    quotas = draw(st.lists(st.floats(0, 1.5 * slice_tokens) | st.integers(0, 12).map(float), min_size=1, max_size=10))
    return quotas, slice_tokens, draw(st.integers(len(quotas), len(quotas) * slice_tokens))


@settings(max_examples=60)
@given(budget_cases())
def test_quotas_are_rounded_by_largest_remainder(case: tuple[list[float], int, int]) -> None:
    quotas, slice_tokens, count = case
    budgets = slice_budgets(torch.tensor(quotas, dtype=torch.float64), slice_tokens, count).tolist()
    assert sum(budgets) == count
    assert all(1 <= budget <= slice_tokens for budget in budgets)
    assert budgets == exact_budgets(quotas, slice_tokens, count)
