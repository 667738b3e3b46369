"""Floors that are searched for are those of a ranking of the whole vocabulary, ties and extremes included."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from gridsieve.services.generation.sampling import truncation
from gridsieve.services.generation.sampling.truncation import floors
from tests.generation.distant_device import DistantDevice

# Some weigh alike in float32 and are not equal, some weigh nothing.
NOTABLE = [0.0, -1e-30, -1e-9, -0.5, -1.0, -1.0000001, -17.5, -60.0, -103.5, -105.0, -3e38, -math.inf]
scores_of_a_row = st.lists(st.sampled_from(NOTABLE) | st.floats(-30, 0, width=32), max_size=40)
shares = st.sampled_from([1e-300, 1e-9, 0.1, 0.25, 0.5, 0.9, 0.999999, 1.0])


def kept_by_ranking(scores: NDArray[np.float32], top_k: int, top_p: float) -> NDArray[np.bool_]:
    """Top-k keeps what is not below the k-th score; top-p, of those, what is not below the first at which their
    probabilities, added up from the most likely, reach `top_p`."""
    ranked = np.sort(scores)[::-1]
    least = ranked[min(top_k or len(ranked), len(ranked)) - 1]
    if top_p < 1:
        held = torch.from_numpy(ranked[ranked >= least].copy()).exp().double().cumsum(0).numpy()
        least = ranked[: len(held)][held >= top_p * held[-1]][0]
    kept: NDArray[np.bool_] = scores >= least
    return kept


def kept(scores: Tensor, top_ks: Sequence[int], top_ps: Sequence[float], far: bool) -> NDArray[np.bool_]:
    if not far:
        found = floors(scores, top_ks, top_ps)
    else:
        with DistantDevice() as device:
            found = floors(device.put(scores), top_ks, top_ps)
        found = device.fetch(found)
    kept: NDArray[np.bool_] = (scores >= found).numpy()
    return kept


@pytest.mark.parametrize("far", [False, True])
@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(scores_of_a_row, st.integers(0, 45), shares), min_size=1, max_size=4),
    ranked=st.sampled_from([1, 3, 1024]),
)
def test_what_is_kept_is_what_a_ranking_keeps(
    rows: list[tuple[list[float], int, float]], ranked: int, far: bool
) -> None:
    """ranked: how many tokens are ranked at most, where a large top-k and a CPU begin to search."""
    size = 1 + max(len(scores) for scores, _, _ in rows)
    # With at least one maximum.
    padded = np.array([[*scores, *[0.0] * (size - len(scores))] for scores, _, _ in rows], np.float32)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(truncation, "_RANKED", ranked)
        found = kept(torch.from_numpy(padded), [top_k for _, top_k, _ in rows], [top_p for _, _, top_p in rows], far)
    for one, scores, (_, top_k, top_p) in zip(found, padded, rows, strict=True):
        assert np.array_equal(one, kept_by_ranking(scores, top_k, top_p))


@pytest.mark.parametrize("far", [False, True])
def test_a_large_vocabulary_is_cut_where_a_ranking_cuts_it(far: bool) -> None:
    logits = torch.randn(3, 152_064, generator=torch.Generator().manual_seed(1)) * torch.tensor([[0.1], [1], [3]])
    logits[1:] = (8 * logits[1:]).round() / 8  # many ties
    scores = logits - logits.amax(dim=-1, keepdim=True)
    top_ks, top_ps = [0, 30_000, 0], [0.95, 0.8, 0.99]
    found = kept(scores, top_ks, top_ps, far)
    for one, row, top_k, top_p in zip(found, scores.numpy(), top_ks, top_ps, strict=True):
        assert np.array_equal(one, kept_by_ranking(row, top_k, top_p))
