"""Draft tokens are what followed the same tokens before, and never change an answer."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.generation.engine.speculation import propose_draft_tokens
from services.generation.sampling.sampler import SamplingParams
from tests.oracle import Item, Text
from tests.tiny import Asked, Models, TinyEngine, make_request, random_item

pytest_plugins = ["tests.generation.engine_fixtures"]

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
    assert propose_draft_tokens(request, limit) == tuple(expected)


@pytest.mark.parametrize(
    "parts",
    [[Text((5, 6)), VIDEO, Text((7,)), VIDEO, Text((5, 6))], [VIDEO, Text((7,)), VIDEO]],
    ids=["drafts", "match"],
)
def test_media_rows_are_neither_matched_nor_proposed(parts: list[Text | Item]) -> None:
    request = make_request("a", parts, SamplingParams(9)).request
    for index in (0, 1):
        request.rope.deliver(index, None, 1 + index)
    assert propose_draft_tokens(request, 3) == ()
    assert request.rope.text_ids is request.rope.text_ids, "long prompts are masked once, not each step"


def test_answers_are_those_without_draft_tokens_and_take_fewer_steps(models: Models) -> None:
    params = [
        SamplingParams(40),
        SamplingParams(40, temperature=0.3, seed=5),
        SamplingParams(40, temperature=1.0, top_k=3, seed=6, logprobs=True, top_logprobs=2),
        SamplingParams(
            40, temperature=0.5, repetition_penalty=0.5, presence_penalty=-0.2, frequency_penalty=-0.1, seed=7
        ),
    ]
    _, plain = ask_repetitive(models, 0, params)
    engine, drafted = ask_repetitive(models, 4, params)
    for one, other in zip(plain, drafted, strict=True):
        assert one.answer == other.answer
    assert engine.engine.stats().totals.draft_tokens > 0


def test_accepted_draft_tokens_save_steps_and_stop_at_the_end_of_the_answer(models: Models) -> None:
    slow, [plain] = ask_repetitive(models, 0, [SamplingParams(60)])
    fast, [drafted] = ask_repetitive(models, 4, [SamplingParams(60)])
    accepted = fast.engine.stats().totals.accepted_draft_tokens
    assert drafted.answer == plain.answer
    assert accepted > 0
    assert len(fast.runner.steps) == len(slow.runner.steps) - accepted
    end = plain.answer[-1]
    _, [ended] = ask_repetitive(models, 4, [SamplingParams(60, eos_ids=(end,))])
    assert ended.answer == plain.answer[: plain.answer.index(end) + 1]
    assert ended.finished


def ask_repetitive(
    models: Models, max_draft_tokens: int, params: list[SamplingParams]
) -> tuple[TinyEngine, list[Asked]]:
    """An engine that has answered one repetitive prompt with each of the parameters, all at once."""
    item = random_item(models.family, (2, 2, 2), Fraction(1))
    parts = [Text((20, 21, 22, 23) * 4), item, Text((20, 21, 22, 23) * 2)]
    engine = TinyEngine(models.engine, blocks=128, max_draft_tokens=max_draft_tokens)
    asked = [engine.ask(str(number), parts, each) for number, each in enumerate(params)]
    for each in asked:
        engine.deliver(each, 0, item, range(item.tokens))
    engine.drain()
    engine.engine.check_integrity()
    assert engine.engine.stats().blocks_used == 0
    return engine, asked
