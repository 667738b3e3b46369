"""What one question leaves behind for the next, through three real processes: nothing is done twice."""

from __future__ import annotations

import pytest

from framesieve.cli.launcher import LocalStack
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Message, Text, Video
from tests import media
from tests.integration.conftest import idle, metric

QUESTION = "What moves in this video?"


async def work_done(stack: LocalStack) -> dict[str, float]:
    """Frames that were decoded, items that the encoder was asked for, and how often it looked into its own cache."""
    await idle(stack)
    return {
        "frames": metric(stack, "preprocessing", "framesieve_preprocessing_frames_total"),
        "items": metric(stack, "encoder", "framesieve_encoder_items_total"),
        "lookups": metric(stack, "encoder", "framesieve_encoder_cache_lookups_total"),
    }


@pytest.mark.parametrize("rate", [0.0, 0.75])
async def test_a_second_question_decodes_encodes_and_sends_nothing(stack: LocalStack, rate: float) -> None:
    video = Video(data=media.clip(seed=round(100 * rate) + 1))
    async with FramesieveClient(stack.address) as client:
        first = await client.ask(video, QUESTION, pruning_rate=rate, max_new_tokens=8, temperature=0)
        before = await work_done(stack)
        again = await client.ask(video, QUESTION, pruning_rate=rate, max_new_tokens=8, temperature=0)
        other = await client.ask(video, "And of what colour is it?", pruning_rate=rate, max_new_tokens=8, temperature=0)
        assert await work_done(stack) == before
    assert first.usage.cached_prompt_tokens == 0
    assert again.token_ids == first.token_ids
    for answer in (again, other):
        assert answer.usage.cached_prompt_tokens > 0
        assert answer.usage.media == first.usage.media
        assert answer.timings.encode_s == answer.timings.transfer_s == 0
        assert sum(answer.timings.stages_s.values()) == pytest.approx(answer.timings.time_to_first_token_s, abs=1e-9)


async def test_another_rate_comes_from_the_encoder_again(stack: LocalStack) -> None:
    video = Video(data=media.clip(seed=41))
    async with FramesieveClient(stack.address) as client:
        await client.ask(video, QUESTION, pruning_rate=0.25, max_new_tokens=2)
        before = await work_done(stack)
        await client.ask(video, QUESTION, pruning_rate=0.5, max_new_tokens=2)
        after = await work_done(stack)
    assert after["frames"] == before["frames"]
    assert after["items"] == before["items"] + 1


async def test_the_next_turn_computes_what_is_new(stack: LocalStack) -> None:
    video = Video(data=media.clip(seed=42))
    async with FramesieveClient(stack.address) as client:
        first = await client.ask(video, QUESTION, pruning_rate=0.5, max_new_tokens=8, temperature=0)
        before = await work_done(stack)
        turns = (Message("user", (video, Text(QUESTION))), Message("assistant", (Text(first.text),)))
        second = await client.ask(None, "Why?", history=turns, pruning_rate=0.5, max_new_tokens=8, temperature=0)
        assert await work_done(stack) == before
    assert second.usage.cached_prompt_tokens > first.usage.prompt_tokens - 16


async def test_several_answers_compute_the_prompt_once_and_each_is_that_of_its_own_seed(stack: LocalStack) -> None:
    video = Video(data=media.clip(seed=43))
    options = {"pruning_rate": 0.5, "max_new_tokens": 8, "temperature": 1.0}
    async with FramesieveClient(stack.address) as client:
        items = (await work_done(stack))["items"]
        several = await client.ask(video, QUESTION, n=3, seed=7, **options)
        assert (await work_done(stack))["items"] == items + 1
        alone = [await client.ask(video, QUESTION, seed=seed, **options) for seed in (7, 8, 9)]
    assert [choice.token_ids for choice in several.choices] == [answer.token_ids for answer in alone]
    assert len({choice.token_ids for choice in several.choices}) == 3
