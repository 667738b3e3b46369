"""EVS, also causal, against float64 NumPy; random; for every method, counts, cached scores and no device waits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from gridsieve.common.contract.plan import Grid
from gridsieve.common.contract.retention import AFTER_TOWER, ItemPruning
from gridsieve.services.encoder.pruning import ranking
from gridsieve.services.encoder.pruning.evs import evs_scores
from gridsieve.services.encoder.pruning.methods import SCORES_BYTES, Scores, keep_tokens
from tests.encoder.kept import FLOAT32_ERROR, GRIDS, RATES, check_kept, exact_count, exact_scores, videos


@settings(max_examples=60)
@given(videos(), RATES)
def test_evs_keeps_the_tokens_of_the_formula(video: tuple[NDArray[np.float32], Grid], rate: float) -> None:
    embeds, grid = video
    kept = keep_tokens(torch.from_numpy(embeds), grid, ItemPruning(rate)).numpy()
    check_kept(kept, exact_scores(embeds, grid), exact_count(grid, rate, grid.h * grid.w), FLOAT32_ERROR)


def test_a_still_picture_keeps_the_earliest_tokens() -> None:
    random = torch.Generator().manual_seed(0)
    slice_0 = torch.randn(20, 64, generator=random)
    # The same picture as another batch would round it.
    noise = 1 + 1e-6 * torch.randn(8, 20, 64, generator=random)
    kept = keep_tokens((slice_0 * noise).view(-1, 64), Grid(8, 4, 5), ItemPruning(0.5))
    assert kept.tolist() == list(range(80))


@pytest.mark.parametrize("method", ["evs", "vidcom2", "vcast"])
def test_a_long_video_read_in_parts_keeps_the_same_tokens(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    grid, pruning = Grid(7, 4, 4), ItemPruning(0.7, method)
    embeds = torch.randn(grid.tokens, 24, generator=torch.Generator().manual_seed(7))
    at_once = keep_tokens(embeds, grid, pruning)
    monkeypatch.setattr(ranking, "_READ_AT_ONCE", 3 * grid.slice_tokens * 24)
    assert torch.equal(keep_tokens(embeds, grid, pruning), at_once)


def test_evs_equals_transformers_unless_counts_or_rounding_differ() -> None:
    from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import compute_retention_mask

    compared = 0
    for seed in range(30):
        random = torch.Generator().manual_seed(seed)
        grid = Grid(*torch.randint(1, 9, (3,), generator=random).tolist())
        rate = int(torch.randint(0, 100, (1,), generator=random)) / 100
        embeds = torch.randn(grid.tokens, 16, generator=random)
        mask = compute_retention_mask(embeds, grid.t, rate)
        theirs = mask.nonzero().view(-1).int()
        count = exact_count(grid, rate, grid.h * grid.w)
        best = evs_scores(embeds, grid)[0].sort(descending=True).values
        if theirs.numel() == count and (count == grid.tokens or best[count - 1] > best[count]):
            compared += 1
            assert torch.equal(keep_tokens(embeds, grid, ItemPruning(rate)), theirs)
    assert compared > 20


# The fewest tokens that each method keeps of a video.
FLOORS = {
    "evs": lambda grid: grid.h * grid.w,
    "random": lambda grid: grid.h * grid.w,
    "vidcom2": lambda grid: grid.t,
    "vcast": lambda grid: grid.t,
}


def causal_count(grid: Grid, rate: float) -> int:
    """Slice 0 and at least one token of each other."""
    return grid.h * grid.w + (grid.t - 1) * exact_count(Grid(1, grid.h, grid.w), rate, 1)


@settings(max_examples=40)
@given(videos(), RATES)
def test_causal_evs_keeps_the_tokens_of_the_formula_in_each_slice(
    video: tuple[NDArray[np.float32], Grid], rate: float
) -> None:
    embeds, grid = video
    kept = keep_tokens(torch.from_numpy(embeds), grid, ItemPruning(rate, "evs_causal")).numpy()
    assert kept.size == causal_count(grid, rate)
    scores = exact_scores(embeds, grid).reshape(grid.t, -1)
    for i in range(grid.t):
        places = kept[kept // grid.slice_tokens == i] - i * grid.slice_tokens
        count = exact_count(Grid(1, grid.h, grid.w), rate, 1) if i else grid.slice_tokens
        check_kept(places, scores[i], count, FLOAT32_ERROR)


@pytest.mark.parametrize("method", [*FLOORS, "evs_causal"])
@settings(max_examples=15)
@given(grid=GRIDS, rate=RATES)
def test_every_method_keeps_its_exact_count_without_reading_values(method: str, grid: Grid, rate: float) -> None:
    """A tensor on torch's meta device has no values: reading one, for which a GPU would be waited for, fails."""
    kept = keep_tokens(torch.empty(grid.tokens, 8, device="meta"), grid, ItemPruning(rate, method))
    assert kept.device.type == "meta"
    assert kept.dtype == torch.int32
    expected = exact_count(grid, rate, FLOORS[method](grid)) if method in FLOORS else causal_count(grid, rate)
    assert kept.shape == (expected,)


@pytest.mark.parametrize("method", [*FLOORS, "evs_causal"])
def test_scores_are_float32_and_serve_every_rate(method: str) -> None:
    grid, known = Grid(5, 4, 4), dict[str, Scores]()
    embeds = torch.randn(grid.tokens, 16, generator=torch.Generator().manual_seed(6)).bfloat16()
    fresh = [keep_tokens(embeds.float(), grid, ItemPruning(rate, method)) for rate in (0.25, 0.5, 0.75)]
    keep_tokens(embeds, grid, ItemPruning(0.4, method), known)
    # With the scores cached, the embeddings are not read.
    again = [
        keep_tokens(torch.zeros_like(embeds), grid, ItemPruning(rate, method), known) for rate in (0.25, 0.5, 0.75)
    ]
    assert list(known) == ["evs" if method == "evs_causal" else method]
    assert all(torch.equal(*pair) for pair in zip(fresh, again, strict=True))


def test_cached_scores_take_at_most_the_bytes_that_the_cache_accounts_for() -> None:
    grid, known = Grid(5, 1, 2), dict[str, Scores]()
    for method in AFTER_TOWER:
        keep_tokens(torch.randn(grid.tokens, 16), grid, ItemPruning(0.5, method), known)
    taken = sum(each.nbytes for scores in known.values() for each in scores)
    assert 0.8 * SCORES_BYTES * grid.tokens < taken <= SCORES_BYTES * grid.tokens


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), GRIDS, RATES)
def test_random_depends_only_on_grid_rate_and_seed(seed: int, grid: Grid, rate: float) -> None:
    order = torch.randperm(grid.tokens, generator=torch.Generator().manual_seed(seed)).numpy()
    count = exact_count(grid, rate, FLOORS["random"](grid))
    best = np.sort(np.argsort(-order)[:count])  # a token's score is its number in the order
    assert keep_tokens(torch.zeros(grid.tokens, 2), grid, ItemPruning(rate, "random", seed)).tolist() == best.tolist()
