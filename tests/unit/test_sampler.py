"""Tokens are chosen as transformers' logits processors say, and by a request's own seed alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from services.generation.sampler import Chosen, SamplingParams, SamplingState, sample, truncate

VOCABULARY = 61
GREEDY = SamplingParams(max_new_tokens=8)
DRAWN = SamplingParams(max_new_tokens=8, temperature=1.0)

params = st.builds(
    SamplingParams,
    max_new_tokens=st.just(8),
    temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 60, 61, 500]),
    top_p=st.sampled_from([1e-9, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.05, 2.0]),
    seed=st.integers(0, 2**63 - 1),
)
prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20)


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4


def state_of(params: SamplingParams, prompt: list[int]) -> SamplingState:
    return SamplingState(params, np.array(prompt, np.int32))


def ids(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    return [chosen.token_id for chosen in sample(logits, states)]


def by_transformers(logits: torch.Tensor, history: list[int], params: SamplingParams) -> torch.Tensor:
    """Processed scores, put together as `generate` puts its processors together."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.temperature:
        processors.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            processors.append(TopPLogitsWarper(params.top_p))
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.tensor([history]), logits.clone())


@given(batch=st.lists(params, min_size=1, max_size=5), seed=st.integers(0, 1000))
def test_each_row_keeps_what_transformers_keeps_with_the_same_odds(batch: list[SamplingParams], seed: int) -> None:
    logits = logits_of(seed, len(batch))
    ours = truncate(logits, batch).softmax(-1)
    for row, each in enumerate(batch):
        theirs = by_transformers(logits[row : row + 1], [0], replace(each, repetition_penalty=1.0)).softmax(-1)[0]
        assert torch.equal(ours[row] > 0, theirs > 0)
        assert torch.allclose(ours[row], theirs, atol=1e-6)


@given(params=params, prompt=prompts, seed=st.integers(0, 1000))
def test_drawn_answers_are_those_that_transformers_odds_give_for_the_same_numbers(
    params: SamplingParams, prompt: list[int], seed: int
) -> None:
    state = state_of(params, prompt)
    numbers = torch.Generator().manual_seed(params.seed)
    history = list(prompt)
    for step in range(4):
        logits = logits_of(seed + step)
        [token] = ids(logits, [state])
        odds = by_transformers(logits, history, params).double().softmax(-1)[0]
        number = float(torch.rand((), dtype=torch.float64, generator=numbers))
        below, through = float(odds[:token].sum()), float(odds[: token + 1].sum())
        assert odds[token] > 0
        assert below - 1e-5 <= number <= through + 1e-5
        history.append(token)


@given(penalty=st.sampled_from([0.5, 1.05, 1.5, 5.0]), prompt=prompts, seed=st.integers(0, 1000))
def test_greedy_answers_are_penalised_for_prompt_and_answer(penalty: float, prompt: list[int], seed: int) -> None:
    params = replace(GREEDY, repetition_penalty=penalty)
    state, history = state_of(params, prompt), list(prompt)
    for step in range(4):
        logits = logits_of(seed + step)
        [token] = ids(logits, [state])
        assert token == int(by_transformers(logits, history, params).argmax())
        history.append(token)


@given(mine=params, neighbours=st.lists(params, max_size=4), place=st.integers(0, 4), seed=st.integers(0, 99))
def test_an_answer_depends_on_no_neighbour(
    mine: SamplingParams, neighbours: list[SamplingParams], place: int, seed: int
) -> None:
    place = min(place, len(neighbours))
    alone, together = state_of(mine, [3, 4]), state_of(mine, [3, 4])
    others = [state_of(each, [5]) for each in neighbours]
    states = [*others[:place], together, *others[place:]]
    for step in range(4):
        logits = logits_of(seed + step, len(states))
        [expected] = ids(logits[place : place + 1], [alone])
        tokens = ids(logits, states)
        assert tokens[place] == expected


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others() -> None:
    def answer(seed: int) -> list[int]:
        state = state_of(replace(DRAWN, seed=seed), [0])
        return [ids(torch.zeros(1, VOCABULARY), [state])[0] for _ in range(32)]

    assert answer(7) == answer(7)
    assert answer(7) != answer(8)


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    odds = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    state, draws = state_of(DRAWN, [0]), 4000
    tokens = [ids(odds.log()[None], [state])[0] for _ in range(draws)]
    for token, chance in enumerate(odds.tolist()):
        # Five standard deviations of a binomial.
        assert abs(tokens.count(token) - draws * chance) <= 5 * math.sqrt(draws * chance * (1 - chance))


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-53])
def test_a_token_without_probability_is_not_drawn_even_at_the_edges(
    number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SamplingState, "draw", lambda state: number)
    odds = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    [token] = ids(odds.log()[None], [state_of(DRAWN, [0])])
    assert token == (1 if number < 0.5 else 3)


def test_a_greedy_batch_takes_the_likeliest_and_leaves_logits_alone() -> None:
    logits = logits_of(1, 3)
    before = logits.clone()
    chosen = sample(logits, [state_of(GREEDY, [0])] * 3)
    assert chosen == [Chosen(token) for token in before.argmax(-1).tolist()]
    assert torch.equal(logits, before)


def test_log_probabilities_are_of_raw_logits_whatever_was_done_to_choose() -> None:
    chosen_otherwise = replace(DRAWN, temperature=3.0, top_k=4, repetition_penalty=1.5, logprobs=True)
    logits = logits_of(2, 2)
    first, second = sample(logits, [state_of(chosen_otherwise, [1, 2]), state_of(GREEDY, [0])])
    expected = float(logits[0, first.token_id].double() - logits[0].double().logsumexp(-1))
    assert first.logprob == pytest.approx(expected, abs=1e-5)
    assert second.logprob is None


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300])
def test_a_temperature_near_zero_takes_the_likeliest(temperature: float) -> None:
    logits = logits_of(3, 1) * 1000
    [token] = ids(logits, [state_of(replace(DRAWN, temperature=temperature), [0])])
    assert token == int(logits.argmax())


def test_half_precision_logits_are_chosen_from_in_single_precision() -> None:
    logits = logits_of(4, 1).bfloat16()
    [chosen] = sample(logits, [state_of(replace(GREEDY, logprobs=True), [0])])
    expected = logits[0].double()
    assert chosen.logprob == pytest.approx(float(expected[chosen.token_id] - expected.logsumexp(-1)), abs=1e-5)
