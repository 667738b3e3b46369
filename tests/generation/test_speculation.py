"""Guesses are what followed the same tokens last time, and never change an answer."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from services.generation.engine.speculation import propose_draft_tokens
from services.generation.sampling.sampler import SamplingParams
from tests.families import FamilyUnderTest
from tests.law import answer, assert_law, question
from tests.oracle import Item, Text
from tests.tiny import Models, TinyEngine, load_models, make_request, random_item

VIDEO = Item(2, 1, 2, Fraction(1), np.zeros((4, 1), np.float32))


@given(st.lists(st.integers(1, 3), min_size=1, max_size=14), st.lists(st.integers(1, 3), max_size=6), st.integers(1, 4))
def test_a_guess_is_what_followed_the_last_three_tokens_or_two_when_they_stood_there_last(
    prompt: list[int], said: list[int], most: int
) -> None:
    request = make_request("a", [Text(tuple(prompt))], SamplingParams(9)).request
    request.output_ids = said
    history = prompt + said
    expected: list[int] = []
    for length in (2, 3):
        for first in range(len(history) - length):
            if history[first : first + length] == history[-length:]:
                expected = history[first + length : first + length + most]
    assert propose_draft_tokens(request, most) == tuple(expected)


def test_media_are_neither_found_again_nor_guessed() -> None:
    request = make_request("a", [Text((5, 6)), VIDEO, Text((7,)), VIDEO, Text((5, 6))], SamplingParams(9)).request
    for index in (0, 1):
        request.rope.deliver(index, None, 1 + index)
    assert propose_draft_tokens(request, 3) == ()
    request = make_request("a", [VIDEO, Text((7,)), VIDEO], SamplingParams(9)).request
    for index in (0, 1):
        request.rope.deliver(index, None, 1 + index)
    assert propose_draft_tokens(request, 3) == ()


def test_a_prompt_is_masked_once_for_all_answers_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    first = make_request("a", [Text((5, 6, 7, 5, 6))], SamplingParams(9)).request
    assert propose_draft_tokens(first, 2) == (7, 5)

    def again(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(np, "where", again)
    assert propose_draft_tokens(first, 2) == (7, 5)
    sibling = make_request("b", [Text((5, 6, 7, 5, 6))], SamplingParams(9)).request
    sibling.share_prompt(first)
    sibling.output_ids = [7]
    assert propose_draft_tokens(sibling, 1) == (5,)


@pytest.fixture(scope="module")
def models(family: str, tmp_path_factory: pytest.TempPathFactory) -> Models:
    return load_models(family, tmp_path_factory.mktemp(family))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_guessing_obeys_the_law(models: Models, data: st.DataObject) -> None:
    questions = data.draw(st.lists(question(models.family), min_size=1, max_size=4))
    least_blocks = max(each.most_blocks for each in questions)
    engine = TinyEngine(
        models.engine,
        blocks=least_blocks + data.draw(st.sampled_from((0, 1, 4, 16))),
        max_num_batched_tokens=data.draw(st.sampled_from((1, 2, 5, 16, 512))),
        max_num_seqs=data.draw(st.integers(1, 4)),
        max_draft_tokens=data.draw(st.integers(1, 5)),
    )
    asked = answer(engine, questions, data.draw(st.lists(st.integers(0, 8), max_size=4)))
    stats = engine.engine.stats()
    event(f"guessed: {stats.totals.draft_tokens > 0}, right: {stats.totals.accepted_draft_tokens > 0}")
    assert_law(models, engine, questions, asked)
    assert stats.blocks_used == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(40),
        SamplingParams(40, temperature=0.3, seed=5),
        SamplingParams(40, temperature=1.0, top_k=3, seed=6),
        SamplingParams(
            40, temperature=0.5, repetition_penalty=0.5, presence_penalty=-0.2, frequency_penalty=-0.1, seed=7
        ),
    ],
    ids=["greedy", "cold", "top-k", "penalised"],
)
def test_answers_are_those_without_guessing(models: Models, params: SamplingParams) -> None:
    parts = repetitive(models.family)
    answers = []
    for max_draft_tokens in (0, 4):
        engine = TinyEngine(models.engine, blocks=128, max_draft_tokens=max_draft_tokens)
        asked = [engine.ask(str(seed), parts, replace(params, seed=params.seed + seed)) for seed in range(3)]
        item = next(part for part in parts if isinstance(part, Item))
        for each in asked:
            engine.deliver(each, 0, item, range(item.tokens))
        engine.drain()
        engine.engine.check_integrity()
        answers.append([each.answer for each in asked])
    assert answers[0] == answers[1]
    assert engine.engine.stats().totals.draft_tokens > 0


def test_right_guesses_save_steps_and_end_where_the_answer_ends(models: Models) -> None:
    """A model that has begun to repeat itself is guessed rightly; a token that ends the answer ends it."""
    parts = repetitive(models.family)
    item = next(part for part in parts if isinstance(part, Item))
    told: list[tuple[list[int], int]] = []
    for max_draft_tokens in (0, 4):
        engine = TinyEngine(models.engine, blocks=128, max_draft_tokens=max_draft_tokens)
        asked = engine.ask("0", parts, SamplingParams(60))
        engine.deliver(asked, 0, item, range(item.tokens))
        engine.drain()
        told.append((asked.answer, len(engine.runner.steps)))
        right = engine.engine.stats().totals.accepted_draft_tokens
    assert told[0][0] == told[1][0]
    assert told[1][1] == told[0][1] - right
    end = told[0][0][-1]
    engine = TinyEngine(models.engine, blocks=128, max_draft_tokens=4)
    asked = engine.ask("0", parts, SamplingParams(60, eos_ids=(end,)))
    engine.deliver(asked, 0, item, range(item.tokens))
    engine.drain()
    assert asked.answer == told[0][0][: told[0][0].index(end) + 1]
    assert engine.engine.stats().blocks_used == 0


def repetitive(family: FamilyUnderTest) -> list[Text | Item]:
    return [Text((20, 21, 22, 23) * 4), random_item(family, (2, 2, 2), Fraction(1)), Text((20, 21, 22, 23) * 2)]
