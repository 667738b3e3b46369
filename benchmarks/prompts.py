"""Prompts of random text for the engine, and how long it takes for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from gridsieve.common.contract.plan import PromptPlan
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.request.pruned_prompt import PrunedPrompt
from gridsieve.services.generation.request.request import Event, Request
from gridsieve.services.generation.sampling.sampler import SamplingParams
from gridsieve.services.preprocessing.prompt.positions import TextSpan, positions_of


def text_prompt(tokens: int, random: np.random.Generator) -> PromptPlan:
    """A prompt of `tokens` random text tokens. Of one generator, no two share a block of the prefix cache."""
    ids = random.integers(10, 300, tokens).astype(np.int32)
    return PromptPlan(ids, positions_of((TextSpan(tokens),)), (), 0, bytes(32))


def submit(engine: Engine, plan: PromptPlan, params: SamplingParams, on_event: Callable[[Event], None]) -> Request:
    """Submits a prompt of text."""
    request = Request("bench", PrunedPrompt(plan, ()), (), params, None, on_event)
    engine.submit(request)
    return request


def timed_steps(engine: Engine, prompts: Sequence[PromptPlan], steps: int) -> Iterator[tuple[str, float]]:
    """Yields "prompt" and the seconds of the step that prefills all prompts, then "decode" and those of each of `steps`
    steps."""
    for each in prompts:
        submit(engine, each, SamplingParams(steps + 2), lambda _: None)
    for what in ("prompt", *["decode"] * steps):
        start = time.perf_counter()
        engine.step()
        yield what, time.perf_counter() - start
