"""Prompts for the engine's tests: a short text, and a video between two texts."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from services.generation.sampling.sampler import SamplingParams
from tests.oracle import Item, Text
from tests.tiny import Models, TinyEngine

PROMPT = [Text((10, 11, 12, 13, 14))]
VIDEO = Item(2, 2, 2, Fraction(1), np.random.default_rng(1).normal(0, 0.3, (8, 64)).astype(np.float32), rate=0.25)
KEPT = [0, 1, 2, 3, 5, 7]
ABOUT_VIDEO = [Text((10, 11, 12)), VIDEO, Text((13, 14))]


def greedy_answer(models: Models, parts: Sequence[Text | Item], new_tokens: int) -> list[int]:
    """The answer of an engine that runs nothing else."""
    engine = TinyEngine(models.engine)
    asked = engine.ask("alone", parts, SamplingParams(new_tokens))
    engine.drain()
    return asked.answer
