"""Random videos to prune, EVS's scores in float64, and a check of the kept tokens against exact scores."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.services.encoder.pruning.methods import keep_tokens

STEP = 2.0**-16

GRIDS = st.builds(Grid, st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
RATES = st.integers(0, 99).map(lambda hundredths: hundredths / 100)


# The float32 error of 1 − cos over a few dozen values.
FLOAT32_ERROR = 2e-6


def exact_scores(embeds: NDArray[np.float32], grid: Grid) -> NDArray[np.float64]:
    """1 − cos to the token a slice earlier, unrounded, in float64; slice 0 is +inf, NaN is −inf."""
    slices = embeds.astype(np.float64).reshape(grid.t, grid.h * grid.w, -1)
    scores = np.full((grid.t, grid.h * grid.w), np.inf)
    for i in range(1, grid.t):
        for place in range(grid.h * grid.w):
            now, before = slices[i, place], slices[i - 1, place]
            lengths = np.sqrt(now @ now) * np.sqrt(before @ before)
            cosine = now @ before / lengths if lengths else (np.nan if np.isnan(now + before).any() else 0.0)
            scores[i, place] = -np.inf if np.isnan(cosine) else 1 - cosine
    return scores.ravel()


def check_kept(kept: NDArray[np.int32], scores: NDArray[np.float64], count: int, error: float) -> None:
    """Checks that the `count` best rounded scores are kept, ties to the earlier token.

    A score within `error` of the border between two steps may round to either. Tokens for which that decides may be
    kept or not; all others are checked.
    """
    low, high = (np.round((scores + each) / STEP) for each in (-error, error))
    assert kept.dtype == np.int32
    assert kept.size == count
    assert (np.diff(kept) > 0).all()
    chosen = set(kept.tolist())
    for i in range(scores.size):
        earlier = np.arange(scores.size) < i
        rivals = np.arange(scores.size) != i
        may_beat = ((high > low[i]) | ((high == low[i]) & earlier)) & rivals
        must_beat = ((low > high[i]) | ((low == high[i]) & earlier)) & rivals
        if may_beat.sum() < count:
            assert i in chosen
        if must_beat.sum() >= count:
            assert i not in chosen


def keep_by_slice(
    embeds: NDArray[np.float32] | torch.Tensor, grid: Grid, rate: float, method: str
) -> list[NDArray[np.int32]]:
    """Places within each slice, by a method that keeps at least one token of each."""
    kept = keep_tokens(torch.as_tensor(embeds), grid, ItemPruning(rate, method)).numpy()
    assert kept.size == exact_count(grid, rate, grid.t)
    slices = [kept[kept // grid.slice_tokens == i] - i * grid.slice_tokens for i in range(grid.t)]
    assert all(places.size for places in slices)
    return slices


def exact_count(grid: Grid, rate: float, floor_tokens: int) -> int:
    return max(floor_tokens, floor(grid.t * grid.h * grid.w * (1 - Fraction(str(rate)))))


@st.composite
def videos(draw: st.DrawFn) -> tuple[NDArray[np.float32], Grid]:
    """Random embeddings, in which some tokens repeat, are zero or NaN, or differ little."""
    grid, width = draw(GRIDS), draw(st.integers(2, 12))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    slices = random.standard_normal((grid.t, grid.h * grid.w, width)).astype(np.float32)
    for i in range(grid.t):
        for place in range(grid.h * grid.w):
            before = slices[max(0, i - 1), place].copy()
            fates = {
                "random": slices[i, place],
                "repeat": before,
                "scaled": 2 * before,
                "nearly": before * (1 + 0.01 * random.standard_normal(width)),
                "zero": np.zeros(width),
                "nan": np.where(np.arange(width), before, np.nan),
            }
            slices[i, place] = fates[draw(st.sampled_from(["random", *fates]))]
    return slices.reshape(-1, width), grid
