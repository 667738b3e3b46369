"""Sampling follows transformers' logits processors and depends on nothing but the request's own seed and options."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from gridsieve.services.generation.sampling.detokenizer import load_tokenizer
from gridsieve.services.generation.sampling.sampler import (
    SampledToken,
    SamplingParams,
    SamplingState,
    choose,
    sample_and_verify,
)
from gridsieve.services.generation.sampling.structured import Grammars
from tests.tiny import Models

VOCABULARY = 61
END = 2
GREEDY = SamplingParams(max_new_tokens=8)
DRAWN = SamplingParams(max_new_tokens=8, temperature=1.0)

likely = st.integers(0, 2)  # what rules name, so that they come into effect
params = st.builds(
    SamplingParams,
    max_new_tokens=st.just(8),
    temperature=st.sampled_from([0.0, 0.25, 0.7, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 60, 61, 500]),
    top_p=st.sampled_from([1e-9, 1e-6, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([0.8, 1.0, 1.05, 2.0]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.0, 2.0]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 0.0, 1.5]),
    logprobs=st.booleans(),
    top_logprobs=st.sampled_from([0, 1, 5, 20]),
    seed=st.integers(0, 2**63 - 1),
    eos_ids=st.sampled_from([(), (1,), (0, 2)]),
    min_new_tokens=st.integers(0, 3),
    logit_bias=st.dictionaries(likely, st.sampled_from([-100.0, -3.5, 0.0, 2.5])).map(lambda each: tuple(each.items())),
    bad_words=st.lists(st.lists(likely, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)
prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20)


def sample(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[SampledToken]:
    """Samples one token for each row, waits for it, and adds it to the row's state. logits: [B, V], any float dtype."""
    choice = choose(logits, states)
    sampled = choice.read()
    for error in choice.errors.values():
        raise error
    return sampled


def logits_of(seed: int, rows: int = 1) -> torch.Tensor:
    logits = torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4
    logits[:, :3] += 6
    return logits


def state_of(params: SamplingParams, prompt: list[int]) -> SamplingState:
    return SamplingState(params, np.array(prompt, np.int32))


def ids(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    return [chosen.token_id for chosen in sample(logits, states)]


class CountingPenalties(LogitsProcessor):
    """OpenAI's formula, token by token: mu[j] -= c[j] * frequency + float(c[j] > 0) * presence."""

    def __init__(self, params: SamplingParams, prompt_tokens: int) -> None:
        self.presence, self.frequency = params.presence_penalty, params.frequency_penalty
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = Counter(input_ids[0, self.prompt_tokens :].tolist())
        for token, count in counts.items():
            scores[0, token] -= count * self.frequency + float(count > 0) * self.presence
        return scores


class NoBadWordsInAnswer(NoBadWordsLogitsProcessor):
    """Of the answer alone: bad words in transformers begin in the prompt, too."""

    def __init__(self, params: SamplingParams, prompt_tokens: int) -> None:
        super().__init__([list(word) for word in params.bad_words])
        self.prompt_tokens = prompt_tokens

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return super().__call__(input_ids[:, self.prompt_tokens :], scores)


def by_transformers(
    logits: torch.Tensor, history: list[int], params: SamplingParams, prompt_tokens: int
) -> torch.Tensor:
    """Scores by transformers' processors in the order of `generate`, with the counting penalties after repetition's.

    A bias of -100 forbids a token, as in OpenAI's API.
    """
    processors = LogitsProcessorList()
    if params.logit_bias:
        forbidding = {-100.0: -math.inf}
        biases = [[[token], forbidding.get(value, value)] for token, value in params.logit_bias]
        processors.append(SequenceBiasLogitsProcessor(biases))
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    processors.append(CountingPenalties(params, prompt_tokens))
    if params.bad_words:
        processors.append(NoBadWordsInAnswer(params, prompt_tokens))
    if params.min_new_tokens and params.eos_ids:
        least, ends = params.min_new_tokens, list(params.eos_ids)
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, least, ends, device="cpu"))
    if params.temperature:
        processors.append(TemperatureLogitsWarper(params.temperature))
        if params.top_k:
            processors.append(TopKLogitsWarper(params.top_k))
        if params.top_p < 1:
            processors.append(TopPLogitsWarper(params.top_p))
        processors.append(MinPLogitsWarper(params.min_p))
    return processors(torch.tensor([history]), logits.clone())


drawn_params = params.filter(lambda each: not each.greedy)


@settings(max_examples=60)
@given(params=drawn_params, prompt=prompts, seed=st.integers(0, 1000))
def test_drawn_tokens_invert_the_distribution_of_transformers_at_the_number_of_the_generator(
    params: SamplingParams, prompt: list[int], seed: int
) -> None:
    state = state_of(params, prompt)
    numbers = torch.Generator().manual_seed(params.seed)
    history = list(prompt)
    for step in range(4):
        logits = logits_of(seed + step)
        [token] = ids(logits, [state])
        odds = by_transformers(logits, history, params, len(prompt)).double().softmax(-1)[0]
        number = float(torch.rand((), dtype=torch.float64, generator=numbers))
        below, through = float(odds[:token].sum()), float(odds[: token + 1].sum())
        assert odds[token] > 0
        assert below - 1e-5 <= number <= through + 1e-5
        history.append(token)


@settings(max_examples=40)
@given(params=params, prompt=prompts, seed=st.integers(0, 1000))
def test_greedy_tokens_follow_the_rules_of_transformers(params: SamplingParams, prompt: list[int], seed: int) -> None:
    params = replace(params, temperature=0.0)
    state, history = state_of(params, prompt), list(prompt)
    logits = logits_of(seed)  # the same each time, so that tokens come again
    for _ in range(6):
        [token] = ids(logits, [state])
        assert token == int(by_transformers(logits, history, params, len(prompt)).argmax())
        history.append(token)


def test_a_forbidden_token_is_chosen_only_where_a_grammar_leaves_no_other(models: Models) -> None:
    vocabulary = models.engine.vocab_size
    document = Grammars(models.folder, vocabulary, [END]).compile('{"type": "array", "maxItems": 0}')
    tokenizer = load_tokenizer(models.folder)
    always = tuple((token_id, -100.0) for token_id in range(vocabulary))
    for base in (GREEDY, DRAWN):
        state = state_of(replace(base, grammar=document, logit_bias=always), [5])
        answer = list[int]()
        while answer[-1:] != [END]:
            answer += ids(torch.randn(1, vocabulary), [state])
        assert json.loads(tokenizer.decode(answer[:-1])) == []


@pytest.mark.parametrize("penalty", [1e-300, 100.0])
def test_extreme_repetition_penalties_never_give_a_token_without_probability(penalty: float) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, -torch.inf]])
    for base in (GREEDY, DRAWN):
        state = state_of(replace(base, repetition_penalty=penalty), [1])
        # Near 0 the token of the prompt takes all probability. At 100 its logit is about 0, the last one is −inf.
        tokens = [ids(logits, [state])[0] for _ in range(3)]
        assert set(tokens) == {1} if penalty < 1 else 3 not in tokens


@settings(max_examples=60)
@given(mine=params, neighbours=st.lists(params, max_size=4), place=st.integers(0, 4), seed=st.integers(0, 99))
def test_an_answer_does_not_depend_on_its_neighbours_or_their_options(
    mine: SamplingParams, neighbours: list[SamplingParams], place: int, seed: int
) -> None:
    place = min(place, len(neighbours))
    alone, together = state_of(mine, [3, 4]), state_of(mine, [3, 4])
    others = [state_of(each, [5]) for each in neighbours]
    states = [*others[:place], together, *others[place:]]
    for step in range(4):
        logits = logits_of(seed + step, len(states)).round()  # with ties
        assert sample(logits[place : place + 1], [alone]) == [sample(logits, states)[place]]


@pytest.mark.parametrize(("number", "drawn"), [(0.0, 1), (0.5, 3), (1 - 2**-53, 3)])
@pytest.mark.parametrize("temperature", [1e-300, 1.0])
def test_a_token_of_probability_0_is_never_drawn(
    number: float, drawn: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SamplingState, "draw", lambda state: number)
    odds = torch.tensor([0.0, 0.5, 0.0, 0.5, 0.0])
    assert ids(odds.log()[None], [state_of(replace(DRAWN, temperature=temperature), [0])]) == [drawn]


def test_log_probabilities_are_of_raw_logits_whatever_the_options() -> None:
    chosen_otherwise = replace(DRAWN, temperature=3.0, top_k=4, repetition_penalty=1.5, logprobs=True)
    logits = logits_of(2, 2)
    first, second = sample(logits, [state_of(chosen_otherwise, [1, 2]), state_of(GREEDY, [0])])
    expected = float(logits[0, first.token_id].double() - logits[0].double().logsumexp(-1))
    assert first.logprob == pytest.approx(expected, abs=1e-5)
    assert second.logprob is None


@settings(max_examples=40)
@given(
    values=st.lists(st.integers(-3, 3), min_size=25, max_size=40),
    wanted=st.lists(st.sampled_from([0, 1, 2, 5, 20]), min_size=1, max_size=4),
    penalty=st.sampled_from([1.0, 1.5]),
)
def test_top_log_probabilities_are_in_descending_order_with_ties_by_id(
    values: list[int], wanted: list[int], penalty: float
) -> None:
    logits = torch.tensor([values] * len(wanted), dtype=torch.float32)
    asked = replace(GREEDY, logprobs=True, repetition_penalty=penalty)
    states = [state_of(replace(asked, top_logprobs=each), [0, 1]) for each in wanted]
    logprobs = [value - math.log(sum(math.exp(each) for each in values)) for value in values]
    order = sorted(range(len(values)), key=lambda token: (-values[token], token))
    for each, chosen in zip(wanted, sample(logits, states), strict=True):
        assert [token for token, _ in chosen.top] == order[:each]
        assert [value for _, value in chosen.top] == pytest.approx(
            [logprobs[token] for token in order[:each]], abs=1e-5
        )
        assert chosen.logprob == pytest.approx(logprobs[chosen.token_id], abs=1e-5)


def test_nan_logits_do_not_affect_other_rows() -> None:
    logits = logits_of(5, 7)
    logits[::2] = torch.nan
    penalised = replace(DRAWN, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3)
    for params in (replace(GREEDY, logprobs=True, top_logprobs=3), penalised):
        together = sample(logits, [state_of(params, [0]) for _ in range(7)])
        alone = [sample(logits[row : row + 1], [state_of(params, [0])])[0] for row in (1, 3, 5)]
        assert together[1::2] == alone


@settings(max_examples=40)
@given(
    batch=st.lists(st.tuples(params, st.lists(st.integers(0, 2), max_size=4)), min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
def test_draft_tokens_are_accepted_while_they_equal_the_tokens_sampled_one_by_one(
    batch: list[tuple[SamplingParams, list[int]]], seed: int
) -> None:
    """A vocabulary of three tokens, so that some draft tokens are right."""
    drafts = [draft for _, draft in batch]
    rows = [torch.randn(1 + len(draft), 3, generator=torch.Generator().manual_seed(seed)) for draft in drafts]
    expected: list[list[SampledToken]] = []
    for (each, draft), logits in zip(batch, rows, strict=True):
        state, answer = state_of(each, [0]), list[SampledToken]()
        for row, wanted in zip(logits, [*draft, None], strict=True):
            answer += sample(row[None], [state])
            if answer[-1].token_id != wanted:
                break
        expected.append(answer)
    states = [state_of(each, [0]) for each, _ in batch]
    assert sample_and_verify(torch.cat(rows), states, drafts) == expected
