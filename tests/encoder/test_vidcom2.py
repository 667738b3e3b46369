"""Which tokens VidCom2 keeps: against a reimplementation in float64 NumPy, in loops."""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from common.contract.plan import Grid
from common.contract.retention import Pruning
from services.encoder.pruning import ranking as scores
from services.encoder.pruning import vidcom2
from services.encoder.pruning.methods import keep_tokens
from tests.encoder.kept import RATES, check_kept, exact_count, videos

# What float32 may be wrong by in a sum of ten Gaussians of distances between unit vectors, and in a slice's mean of it.
SCORE_ERROR = 5e-6
MEAN_ERROR = 3e-6

Doubles: TypeAlias = NDArray[np.float64]


# --- the definition again, without the service's code -----------------------------------------------------------


def unit_tokens(embeds: NDArray[np.float32], grid: Grid) -> tuple[Doubles, NDArray[np.bool_]]:
    """Tokens (t, h·w, D/2) over the channels that vary least, and which tokens are finite: the others are zeros."""
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
    """Of each token to its video, and to video and slice together, (t, h·w) each; +inf is what is not finite."""
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
    """One token at a time: to the largest remainder that has had none yet, or from the smallest."""
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


def hangs_by_rounding(to_video: Doubles, rate: float, count: int) -> bool:
    """Whether float32's error in one slice could move a token to another slice."""
    shifts = [np.zeros(len(to_video)), *(sign * row for row in np.eye(len(to_video)) for sign in (-1, 1))]
    outcomes = {
        tuple(exact_budgets(exact_quotas(to_video + MEAN_ERROR * shift[:, None], rate), to_video.shape[1], count))
        for shift in shifts
    }
    return len(outcomes) > 1


def vidcom2_count(grid: Grid, rate: float) -> int:
    return exact_count(grid, rate, grid.t)


def keep(embeds: NDArray[np.float32] | torch.Tensor, grid: Grid, rate: float) -> NDArray[np.int32]:
    kept: NDArray[np.int32] = keep_tokens(torch.as_tensor(embeds), grid, Pruning(rate, "vidcom2")).numpy()
    return kept


def kept_by_slice(kept: NDArray[np.int32], grid: Grid) -> list[NDArray[np.int32]]:
    """Places within each slice."""
    return [kept[kept // grid.slice_tokens == i] - i * grid.slice_tokens for i in range(grid.t)]


# --- what is kept -----------------------------------------------------------------------------------------------


def check_video(embeds: NDArray[np.float32], grid: Grid, rate: float) -> bool:
    """Checks all that is kept; budgets only where they do not hang by rounding, which is returned."""
    count = vidcom2_count(grid, rate)
    kept = keep(embeds, grid, rate)
    assert kept.dtype == np.int32
    assert kept.size == count
    assert (np.diff(kept) > 0).all()
    to_video, to_both = exact_similarities(embeds, grid)
    slices = kept_by_slice(kept, grid)
    settled = not hangs_by_rounding(to_video, rate, count)
    if settled:
        budgets = exact_budgets(exact_quotas(to_video, rate), grid.slice_tokens, count)
        assert [places.size for places in slices] == budgets
    for places, similarities in zip(slices, to_both, strict=True):
        assert places.size >= 1
        check_kept(places, -similarities, places.size, SCORE_ERROR)
    return settled


@given(videos(), RATES)
def test_vidcom2_keeps_what_the_definition_says(video: tuple[NDArray[np.float32], Grid], rate: float) -> None:
    check_video(*video, rate)


def test_vidcom2_shares_tokens_among_slices_as_the_definition_says() -> None:
    settled = 0
    for seed in range(20):
        random = np.random.default_rng(seed)
        # Slices so nearly alike that none takes everything.
        embeds = random.standard_normal((6 * 100, 16)) + 0.6 * random.standard_normal(16)
        settled += check_video(embeds.astype(np.float32), Grid(6, 10, 10), 0.05 + 0.04 * seed)
    assert settled > 15


def test_a_slice_unlike_the_others_keeps_more() -> None:
    random = np.random.default_rng(1)
    slices = np.ones((8, 20, 16), np.float32) + 0.1 * random.standard_normal((8, 20, 16)).astype(np.float32)
    slices[5] = random.standard_normal((20, 16))
    sizes = [places.size for places in kept_by_slice(keep(slices.reshape(-1, 16), Grid(8, 4, 5), 0.5), Grid(8, 4, 5))]
    assert sizes[5] == max(sizes) > 15
    assert sum(sizes) == 80


def test_a_token_unlike_its_slice_is_kept() -> None:
    random = np.random.default_rng(2)
    slices = np.ones((4, 9, 16), np.float32) + 0.1 * random.standard_normal((4, 9, 16)).astype(np.float32)
    odd = [3, 8, 0, 5]
    for i, place in enumerate(odd):
        slices[i, place] = random.standard_normal(16)
    kept = kept_by_slice(keep(slices.reshape(-1, 16), Grid(4, 3, 3), 0.75), Grid(4, 3, 3))
    assert [place in places for place, places in zip(odd, kept, strict=True)] == [True] * 4


def test_one_slice_is_pruned_like_any_other() -> None:
    embeds = np.random.default_rng(3).standard_normal((12, 8)).astype(np.float32)
    _, to_both = exact_similarities(embeds, Grid(1, 3, 4))
    assert keep(embeds, Grid(1, 3, 4), 0.75).tolist() == sorted(np.argsort(to_both[0])[:3].tolist())
    assert keep(embeds, Grid(1, 3, 4), 0.99).tolist() == [int(np.argmin(to_both[0]))]


@pytest.mark.parametrize("value", [0.0, 1.0, -3.7])
def test_equal_tokens_keep_the_earliest_of_each_slice(value: float) -> None:
    slices = kept_by_slice(keep(torch.full((24, 8), value), Grid(4, 2, 3), 0.5), Grid(4, 2, 3))
    assert [places.tolist() for places in slices] == [[0, 1, 2]] * 4


def test_what_equal_slices_leave_over_goes_to_the_earlier_ones() -> None:
    slices = kept_by_slice(keep(torch.ones(30, 8), Grid(5, 2, 3), 0.4), Grid(5, 2, 3))  # 3.6 each, 18 in sum
    assert [places.size for places in slices] == [4, 4, 4, 3, 3]


def test_a_still_picture_keeps_the_earliest_of_what_rounding_noise_tells_apart() -> None:
    random = torch.Generator().manual_seed(0)
    pixels = torch.randn(5, 64, generator=random).repeat_interleave(4, 0)
    noise = 1 + 1e-7 * torch.randn(8, 20, 64, generator=random)
    slices = kept_by_slice(keep((pixels * noise).view(-1, 64), Grid(8, 4, 5), 0.5), Grid(8, 4, 5))
    # Four tokens of each colour: those kept of a colour are its first ones.
    for places in slices:
        for colour in range(5):
            of_colour = [place % 4 for place in places.tolist() if place // 4 == colour]
            assert of_colour == list(range(len(of_colour)))


def test_at_a_rate_that_leaves_less_than_one_token_a_slice_each_keeps_one() -> None:
    grid = Grid(10, 3, 3)  # a twentieth of 90 would be 4
    embeds = np.random.default_rng(4).standard_normal((90, 12)).astype(np.float32)
    _, to_both = exact_similarities(embeds, grid)
    assert keep(embeds, grid, 0.95).tolist() == [9 * i + int(np.argmin(to_both[i])) for i in range(10)]


def test_tokens_that_are_not_finite_are_dropped_first() -> None:
    grid = Grid(3, 2, 4)
    embeds = np.random.default_rng(5).standard_normal((24, 8)).astype(np.float32)
    embeds[2], embeds[7, 3], embeds[17, 0] = np.nan, np.nan, np.inf
    kept = keep(embeds, grid, 0.25)
    assert kept.size == 18
    assert not {2, 7, 17} & set(kept.tolist())


@pytest.mark.parametrize("rate", [0.01, 0.5, 0.95])
def test_nothing_but_nan_still_keeps_the_exact_count(rate: float) -> None:
    kept = keep(torch.full((60, 8), torch.nan), Grid(5, 3, 4), rate)
    assert kept.size == vidcom2_count(Grid(5, 3, 4), rate)
    assert (np.diff(kept) > 0).all()


def test_bfloat16_embeddings_are_scored_in_float32() -> None:
    embeds = torch.randn(5 * 12, 32, generator=torch.Generator().manual_seed(6)).bfloat16()
    assert keep(embeds, Grid(5, 3, 4), 0.6).tolist() == keep(embeds.float(), Grid(5, 3, 4), 0.6).tolist()


def test_a_long_video_is_pruned_as_if_it_were_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    grid = Grid(7, 4, 4)
    embeds = torch.randn(grid.tokens, 24, generator=torch.Generator().manual_seed(7))
    at_once = keep(embeds, grid, 0.7).tolist()
    for values in (1, 2 * 16 * 24, 3 * 16 * 24):
        monkeypatch.setattr(scores, "_READ_AT_ONCE", values)
        assert keep(embeds, grid, 0.7).tolist() == at_once


# --- budgets ----------------------------------------------------------------------------------------------------


def slice_budgets(quotas: list[float], slice_tokens: int, count: int) -> list[int]:
    budgets: list[int] = vidcom2.slice_budgets(torch.tensor(quotas, dtype=torch.float64), slice_tokens, count).tolist()
    return budgets


@st.composite
def budget_cases(draw: st.DrawFn) -> tuple[list[float], int, int]:
    slice_tokens = draw(st.integers(1, 12))
    quotas = draw(st.lists(st.floats(0, 1.5 * slice_tokens) | st.integers(0, 12).map(float), min_size=1, max_size=10))
    return quotas, slice_tokens, draw(st.integers(len(quotas), len(quotas) * slice_tokens))


@given(budget_cases())
def test_budgets_sum_to_the_count_lie_in_bounds_and_never_fall_as_quotas_rise(
    case: tuple[list[float], int, int],
) -> None:
    quotas, slice_tokens, count = case
    budgets = slice_budgets(quotas, slice_tokens, count)
    assert sum(budgets) == count
    assert all(1 <= budget <= slice_tokens for budget in budgets)
    clipped = [min(max(quota, 1.0), slice_tokens) for quota in quotas]
    for quota, budget in zip(clipped, budgets, strict=True):
        assert all(other <= budget for lower, other in zip(clipped, budgets, strict=True) if lower < quota)
    assert budgets == exact_budgets(quotas, slice_tokens, count)


@pytest.mark.parametrize(
    ("quotas", "slice_tokens", "count", "expected"),
    [
        ([2.5, 2.5, 3.0], 9, 8, [3, 2, 3]),  # a tie goes to the earlier
        ([2.25, 2.75, 3.0], 9, 8, [2, 3, 3]),
        ([0.1, 0.1, 5.8], 9, 6, [1, 1, 4]),  # what the floor of one took comes off the largest
        ([3.9, 3.1, 0.0], 9, 6, [3, 2, 1]),  # the smaller remainder gives
        ([3.5, 3.5, 0.0], 9, 6, [3, 2, 1]),  # of equal remainders the later gives
        ([9.9, 1.0, 1.0], 4, 8, [4, 2, 2]),  # what passes a slice's tokens goes to the others
        ([1.0, 1.0, 1.0], 2, 6, [2, 2, 2]),
    ],
)
def test_remainders_decide_who_gets_and_who_gives(
    quotas: list[float], slice_tokens: int, count: int, expected: list[int]
) -> None:
    assert slice_budgets(quotas, slice_tokens, count) == expected
