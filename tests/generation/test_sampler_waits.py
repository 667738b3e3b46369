"""Until it reads its tokens, sampling never makes the host wait for the device; and it samples there as on the CPU.

Floors that are searched for are those of a ranking of the whole vocabulary, ties and extremes included.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from gridsieve.services.generation.sampling import sampler, truncation
from gridsieve.services.generation.sampling.sampler import SampledToken, SamplingParams, SamplingState, choose
from gridsieve.services.generation.sampling.structured import ANY_OBJECT, Grammars
from gridsieve.services.generation.sampling.truncation import floors
from tests.generation.distant_device import DistantDevice
from tests.generation.test_sampler import sample
from tests.tiny import Models

# What published checkpoints ask for, in generation_config.json or on their cards, and truncations that none has.
PUBLISHED: dict[str, Any] = {
    "qwen2_vl": {"temperature": 0.01, "top_k": 1, "top_p": 0.001},
    "qwen2_5_vl": {"temperature": 1e-6, "repetition_penalty": 1.05},
    "qwen3_vl": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "minicpmv": {"temperature": 0.7, "top_k": 100, "top_p": 0.8, "repetition_penalty": 1.05},
    "llama": {"temperature": 0.6, "top_p": 0.9},
    "llava, internvl": {},
    "many": {"temperature": 1.0, "top_k": 1500},
    "the nucleus of many": {"temperature": 1.5, "top_k": 2000, "top_p": 0.95},
}
VOCABULARY = 4000


class FarResults:
    """Stands in for `ToHost`."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def wait(self) -> list[Tensor]:
        return [DistantDevice().fetch(each) for each in self._tensors]


@pytest.fixture(scope="module")
def grammars(models: Models) -> Grammars:
    return Grammars(models.folder, VOCABULARY, [2])


def states_of(given: dict[str, Any], grammars: Grammars) -> list[SamplingState]:
    """States of one default alone, and with each further rule."""
    plain = SamplingParams(9, **given, seed=4)
    each = (
        plain,
        replace(plain, logprobs=True, top_logprobs=5),
        replace(plain, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1),
        replace(plain, min_p=0.02),
        replace(plain, logit_bias=((5, 1.5), (6, -100.0)), min_new_tokens=2, eos_ids=(7,), bad_words=((9, 11), (12,))),
        replace(plain, grammar=grammars.compile(ANY_OBJECT)),
        replace(plain, grammar=grammars.compile(ANY_OBJECT), logprobs=True, min_p=0.1, presence_penalty=-0.5),
    )
    return [SamplingState(one, np.arange(5, dtype=np.int32)) for one in each]


def sampled_far(logits: Tensor, states: Sequence[SamplingState], monkeypatch: pytest.MonkeyPatch) -> list[SampledToken]:
    with monkeypatch.context() as patched, torch.inference_mode(), DistantDevice() as device:
        patched.setattr(sampler, "ToHost", FarResults)
        choice = choose(device.put(logits), states)
    found = choice.read()
    assert not choice.errors
    return found


@pytest.mark.parametrize("names", [*([name] for name in PUBLISHED), [*PUBLISHED]])
def test_published_defaults_are_sampled_without_a_wait_and_as_on_the_cpu(
    names: list[str], grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = ([state for name in names for state in states_of(PUBLISHED[name], grammars)] for _ in range(2))
    for seed in range(3):
        logits = 3 * torch.randn(len(near), VOCABULARY, generator=torch.Generator().manual_seed(seed))
        before = logits.clone()
        assert sampled_far(logits, far, monkeypatch) == sample(logits, near)
        assert torch.equal(logits, before)


# --- where tokens are cut off -----------------------------------------------------------------------------------------

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
