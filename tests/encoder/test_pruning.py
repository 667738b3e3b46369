"""Which tokens are kept: EVS against a reimplementation in float64 NumPy and transformers' own; and the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from numpy.typing import NDArray

from common.contract.plan import Grid
from common.contract.retention import METHODS, Pruning
from services.encoder.pruning.evs import evs_scores
from services.encoder.pruning.methods import SCORES_BYTES, Scores, keep_tokens
from tests.encoder.kept import RATES, check_kept, evs_count, videos

# What float32 may be wrong by in 1 − cos over a few dozen values.
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


@given(videos(), RATES)
def test_evs_keeps_what_the_formula_says(video: tuple[NDArray[np.float32], Grid], rate: float) -> None:
    embeds, grid = video
    kept = keep_tokens(torch.from_numpy(embeds), grid, Pruning(rate)).numpy()
    check_kept(kept, exact_scores(embeds, grid), evs_count(grid, rate), FLOAT32_ERROR)


def test_the_oracle_itself_leaves_no_choice_where_scores_differ_clearly() -> None:
    scores = np.array([np.inf, np.inf, 0.5, 0.25, 0.75, -np.inf])
    check_kept(np.array([0, 1, 4], np.int32), scores, 3, FLOAT32_ERROR)
    with pytest.raises(AssertionError):
        check_kept(np.array([0, 1, 2], np.int32), scores, 3, FLOAT32_ERROR)


def test_a_still_picture_keeps_the_earliest_tokens() -> None:
    random = torch.Generator().manual_seed(0)
    slice_0 = torch.randn(20, 64, generator=random)
    # As another batch would round it: the same picture, last bits apart.
    noise = 1 + 1e-6 * torch.randn(8, 20, 64, generator=random)
    kept = keep_tokens((slice_0 * noise).view(-1, 64), Grid(8, 4, 5), Pruning(0.5))
    assert kept.tolist() == list(range(80))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_embeddings_keep_the_earliest_tokens(value: float) -> None:
    kept = keep_tokens(torch.full((24, 8), value), Grid(6, 2, 2), Pruning(0.5))
    assert kept.tolist() == list(range(12))


def test_nan_loses_to_everything_and_slice_0_wins_even_with_nan() -> None:
    embeds = torch.ones(4 * 3, 5)
    embeds[1] = torch.nan  # in slice 0, so that token 4 scores NaN as well
    embeds[9] = torch.nan
    kept = keep_tokens(embeds, Grid(4, 1, 3), Pruning(0.25))
    assert kept.tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 10]


def test_one_slice_is_kept_whole() -> None:
    kept = keep_tokens(torch.randn(6, 4), Grid(1, 2, 3), Pruning(0.9))
    assert kept.tolist() == list(range(6))


def test_bfloat16_embeddings_are_scored_in_float32() -> None:
    embeds = torch.randn(5 * 12, 32, generator=torch.Generator().manual_seed(3)).bfloat16()
    grid = Grid(5, 3, 4)
    assert torch.equal(evs_scores(embeds, grid)[0], evs_scores(embeds.float(), grid)[0])
    assert torch.equal(keep_tokens(embeds, grid, Pruning(0.6)), keep_tokens(embeds.float(), grid, Pruning(0.6)))


def test_a_long_video_is_scored_as_its_parts_are() -> None:
    grid, width = Grid(24, 16, 16), 1500  # too much to be scored at once
    embeds = torch.randn(grid.tokens, width, generator=torch.Generator().manual_seed(4))
    slices, scores = embeds.view(24, 256, width), evs_scores(embeds, grid)[0].view(24, 256)
    for i in range(1, 24):
        pair = evs_scores(slices[i - 1 : i + 1].reshape(-1, width), Grid(2, 16, 16))[0].view(2, 256)
        assert torch.equal(pair[1], scores[i])


def test_evs_agrees_with_transformers_where_neither_rounding_nor_counts_differ() -> None:
    from transformers.models.nemotron_h_omni.modeling_nemotron_h_omni import compute_retention_mask

    compared = 0
    for seed in range(60):
        random = torch.Generator().manual_seed(seed)
        grid = Grid(*torch.randint(1, 9, (3,), generator=random).tolist())
        rate = int(torch.randint(0, 100, (1,), generator=random)) / 100
        embeds = torch.randn(grid.tokens, 16, generator=random)
        theirs = compute_retention_mask(
            video_embeds=embeds, thw=torch.LongTensor([grid.t, grid.h, grid.w]), spatial_merge_size=1, q=rate
        )
        theirs = theirs.nonzero().view(-1).int()
        count = evs_count(grid, rate)
        best = evs_scores(embeds, grid)[0].sort(descending=True).values
        if theirs.numel() != count or (count < grid.tokens and best[count - 1] == best[count]):
            continue
        compared += 1
        assert torch.equal(keep_tokens(embeds, grid, Pruning(rate)), theirs)
    assert compared > 40


def test_random_keeps_as_many_as_evs_and_depends_on_the_seed_alone() -> None:
    grid, embeds = Grid(6, 4, 4), torch.randn(96, 8)
    first, again, other = (
        keep_tokens(embeds * scale, grid, Pruning(0.75, "random", seed)) for scale, seed in ((1, 7), (0, 7), (1, 8))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.numel() == evs_count(grid, 0.75)
    assert (first.diff() > 0).all()


@pytest.mark.parametrize(("method", "count"), [("evs", 4), ("vidcom2", 3), ("random", 4), ("none", 12)])
def test_every_method_keeps_its_exact_count_in_order(method: str, count: int) -> None:
    assert set(METHODS) == {"evs", "vidcom2", "random", "none"}
    embeds = torch.randn(12, 8, generator=torch.Generator().manual_seed(5))
    kept = keep_tokens(embeds, Grid(3, 2, 2), Pruning(0.75, method))
    assert kept.dtype == torch.int32
    assert kept.numel() == count
    assert (kept.diff() > 0).all()


def test_the_method_none_keeps_everything() -> None:
    assert keep_tokens(torch.zeros(12, 2), Grid(3, 2, 2), Pruning(0.5, "none")).tolist() == list(range(12))


@pytest.mark.parametrize("method", ["evs", "vidcom2", "random"])
def test_what_is_known_of_the_tokens_serves_every_rate(method: str) -> None:
    grid, known = Grid(5, 4, 4), dict[str, Scores]()
    embeds = torch.randn(grid.tokens, 16, generator=torch.Generator().manual_seed(6))
    fresh = [keep_tokens(embeds, grid, Pruning(rate, method)) for rate in (0.25, 0.5, 0.75)]
    keep_tokens(embeds, grid, Pruning(0.4, method), known)
    # Of other embeddings nothing is read any more.
    again = [keep_tokens(torch.zeros_like(embeds), grid, Pruning(rate, method), known) for rate in (0.25, 0.5, 0.75)]
    assert list(known) == [method]
    assert all(torch.equal(*pair) for pair in zip(fresh, again, strict=True))


def test_what_is_known_of_a_token_takes_no_more_than_is_said() -> None:
    grid, known = Grid(5, 4, 4), dict[str, Scores]()
    for method in METHODS:
        keep_tokens(torch.randn(grid.tokens, 16), grid, Pruning(0.5, method), known)
    assert sum(each.nbytes for scores in known.values() for each in scores) == SCORES_BYTES * grid.tokens
