"""Sampling for tests, which wait for the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gridsieve.services.generation.sampling.sampler import SampledToken, SamplingState, choose


def sample(logits: Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    """Samples one token for each row and adds it to the row's state. logits: [B, V], any float dtype."""
    choice = choose(logits, states)
    sampled = choice.read()
    for error in choice.errors.values():
        raise error
    return sampled
