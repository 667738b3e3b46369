"""Options of sampling through three real processes: answers are what the formulas make of raw log-probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from common.contract import errors
from framesieve import Answer, FinishReason, FramesieveClient, Video
from framesieve.cli.launcher import LocalStack
from tests import media

TOKENS = 16


@pytest.fixture
async def client(stack: LocalStack) -> AsyncIterator[FramesieveClient]:
    async with FramesieveClient(stack.address) as connected:
        yield connected


async def ask(client: FramesieveClient, **options: Any) -> Answer:
    asked = {"max_new_tokens": TOKENS, "pruning_rate": 0.5, "timeout_s": 30.0} | options
    return await client.ask(Video(data=media.clip()), "What moves?", **asked)  # type: ignore[arg-type]


async def test_penalties_fall_on_the_answers_own_tokens(client: FramesieveClient) -> None:
    presence, frequency = 0.5, 0.75
    penalties = {"presence_penalty": presence, "frequency_penalty": frequency}
    answer = await ask(client, temperature=0.0, logprobs=True, top_logprobs=20, **penalties)
    counts: Counter[int] = Counter()
    for token_id, logprob, top in zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=True):
        # The best of those that are not in the answer yet is among the 20 likeliest, for the answer holds fewer.
        scores = {one: value - presence * (counts[one] > 0) - frequency * counts[one] for one, value in top}
        assert token_id == max(scores, key=scores.__getitem__)
        assert dict(top)[token_id] == logprob
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        counts[token_id] += 1
    assert answer.token_ids != (await ask(client, temperature=0.0)).token_ids


async def test_a_seed_gives_the_same_answer_whatever_is_returned_beside_it(client: FramesieveClient) -> None:
    drawn = {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 11}
    plain = await ask(client, **drawn)
    told = await ask(client, **drawn, logprobs=True, top_logprobs=5)
    assert told.token_ids == plain.token_ids
    assert [len(top) for top in told.top_logprobs] == [5] * len(told.token_ids)
    assert plain.logprobs == plain.top_logprobs == ()
    assert (await ask(client, **drawn | {"seed": 12})).token_ids != plain.token_ids


async def test_each_of_several_answers_is_the_one_that_its_seed_gives_alone(client: FramesieveClient) -> None:
    together = await ask(client, temperature=1.0, seed=21, n=3)
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    for choice in together.choices:
        alone = await ask(client, temperature=1.0, seed=21 + choice.index)
        assert (alone.text, alone.token_ids, alone.reason) == (choice.text, choice.token_ids, choice.reason)
    assert together.usage.completion_tokens == sum(len(choice.token_ids) for choice in together.choices)


async def test_a_stop_token_ends_an_answer_and_the_models_own_end_may_be_ignored(client: FramesieveClient) -> None:
    # At this temperature every token is as likely as any, the model's own end among them: some answer runs into it.
    wild = {"temperature": 100.0, "max_new_tokens": 100}
    several = await ask(client, **wild, seed=1, n=8)
    ended = next(choice for choice in several.choices if choice.reason is FinishReason.STOP)
    end, seed = ended.token_ids[-1], 1 + ended.index
    onward = await ask(client, **wild, seed=seed, ignore_eos=True)
    assert (len(onward.token_ids), onward.reason) == (100, FinishReason.LENGTH)
    assert onward.token_ids[: len(ended.token_ids)] == ended.token_ids
    # A stop token works like the model's own, and adds to it.
    stopped = await ask(client, **wild, seed=seed, ignore_eos=True, stop_token_ids=[end])
    assert (stopped.token_ids, stopped.text, stopped.reason) == (ended.token_ids, ended.text, ended.reason)
    first = ended.token_ids[0]
    early = await ask(client, **wild, seed=seed, stop_token_ids=[first])
    assert (early.token_ids, early.text, early.reason) == ((first,), "", FinishReason.STOP)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"stop_token_ids": [10**6]}, r"sampling\.stop_token_ids\[0\] must be at least 0 and below \d+, got 1000000"),
        ({"top_logprobs": 2}, r"sampling\.top_logprobs must be 0 without logprobs, got 2"),
        ({"n": 17}, r"sampling\.n must be between 1 and 16, got 17"),
        ({"frequency_penalty": 3.0}, r"sampling\.frequency_penalty must be between -2 and 2, got 3\.0"),
    ],
)
async def test_what_lies_outside_its_range_is_told_in_the_services_own_words(
    client: FramesieveClient, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(errors.InvalidRequest, match=field):
        await ask(client, **options)
    assert (await ask(client, max_new_tokens=2)).usage.completion_tokens >= 1
