"""Draft tokens are what followed the same tokens before, and never change an answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridsieve.services.generation.engine.speculation import PromptLookup
from gridsieve.services.generation.request.request import Request
from gridsieve.services.generation.sampling.sampler import SamplingParams
from tests.oracle import Item, Text
from tests.tiny import Asked, Models, TinyEngine, make_request, random_item

VIDEO = Item(2, 1, 2, Fraction(1), np.zeros((4, 1), np.float32))


@settings(max_examples=60)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=14), st.lists(st.integers(1, 3), max_size=6), st.integers(1, 4))
def test_draft_tokens_are_what_followed_the_last_occurrence_of_the_last_three_tokens_or_two(
    prompt: list[int], said: list[int], limit: int
) -> None:
    request = make_request("a", [Text(tuple(prompt))], SamplingParams(9)).request
    request.output_ids = said
    history = prompt + said
    expected: list[int] = []
    for length in (2, 3):
        for first in range(len(history) - length):
            if history[first : first + length] == history[-length:]:
                expected = history[first + length : first + length + limit]
    assert PromptLookup().propose({request: limit}) == {request: tuple(expected)}


@pytest.mark.parametrize(
    "parts",
    [[Text((5, 6)), VIDEO, Text((7,)), VIDEO, Text((5, 6))], [VIDEO, Text((7,)), VIDEO]],
    ids=["drafts", "match"],
)
def test_media_rows_are_neither_matched_nor_proposed(parts: list[Text | Item]) -> None:
    request = make_request("a", parts, SamplingParams(9)).request
    for index in (0, 1):
        request.prompt.deliver(index, None, 1 + index)
    assert PromptLookup().propose({request: 3}) == {request: ()}


def test_draft_tokens_after_the_end_are_not_part_of_the_answer(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of drafts that are all right."""
    params = SamplingParams(20, temperature=0.9, seed=7)
    slow, plain = ask_repetitive(models, 0, params)
    prefills = len(slow.runner.steps) - len(plain.answer)

    def right(_: PromptLookup, limits: Mapping[Request, int]) -> dict[Request, tuple[int, ...]]:
        return {each: tuple(plain.answer[len(each.output_ids) :][:limit]) for each, limit in limits.items()}

    monkeypatch.setattr(PromptLookup, "propose", right)
    for end in set(plain.answer):
        engine, ended = ask_repetitive(models, 4, replace(params, eos_ids=(end,)))
        assert ended.answer == plain.answer[: plain.answer.index(end) + 1]
        saved = len(ended.answer) + prefills - len(engine.runner.steps)
        assert ended.finished
        assert ended.finished.accepted_draft_tokens == engine.totals["accepted_draft_tokens"] == saved


def ask_repetitive(models: Models, max_draft_tokens: int, params: SamplingParams) -> tuple[TinyEngine, Asked]:
    """An engine that has answered a repetitive prompt."""
    item = random_item(models.family, (2, 2, 2), Fraction(1))
    parts = [Text((20, 21, 22, 23) * 4), item, Text((20, 21, 22, 23) * 2)]
    engine = TinyEngine(models.engine, blocks=128, max_draft_tokens=max_draft_tokens)
    asked = engine.ask("a", parts, params)
    engine.deliver(asked, 0, item, range(item.tokens))
    engine.drain()
    assert engine.engine.stats().blocks_used == 0
    return engine, asked
