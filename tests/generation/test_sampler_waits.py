"""Until it reads its tokens, sampling never makes the host wait for the device; and it samples there as on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gridsieve.services.generation.sampling import sampler
from gridsieve.services.generation.sampling.sampler import SampledToken, SamplingParams, SamplingState, choose
from gridsieve.services.generation.sampling.structured import ANY_OBJECT, Grammars
from tests.generation.distant_device import DistantDevice
from tests.generation.sampled import sample
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
