"""The client's options of sampling on the wire, and several answers out of one stream."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common.contract import errors
from common.contract.errors import InvalidRequest
from common.contract.plan import Grid
from framesieve import Choice, Delta, Finished, FinishReason, Image, Video
from framesieve.client.messages import prompt_message
from framesieve.client.prompt import Embeds, user_turn
from framesieve.v1.generation_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Accepted,
    GenerateResponse,
    Sampling,
    Timings,
    TopLogprobs,
    Usage,
)
from framesieve.v1.generation_pb2 import Delta as DeltaMessage
from framesieve.v1.generation_pb2 import Finished as FinishedMessage
from tests.framesieve.generation_stand_in import moving_ball, served

OPTIONS: dict[str, Any] = {
    "max_new_tokens": 60,
    "temperature": 0.0,
    "top_p": 0.25,
    "top_k": 0,
    "seed": 0,
    "stop": ["x", "y"],
    "logprobs": True,
    "min_p": 0.0,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.0,
    "frequency_penalty": -2.0,
    "top_logprobs": 20,
    "stop_token_ids": (5, 6),
    "n": 1,
    "ignore_eos": True,
}


def delta(index: int, text: str, *token_ids: int) -> GenerateResponse:
    """Each token's log-probability is minus its id, and so is that of those beside it."""
    tops = [TopLogprobs(token_ids=[one, one + 1], logprobs=[-one, -one - 1]) for one in token_ids]
    logprobs = [-one for one in token_ids]
    message = DeltaMessage(choice_index=index, text=text, token_ids=token_ids, logprobs=logprobs, top_logprobs=tops)
    return GenerateResponse(delta=message)


def finished(index: int, tokens: int, generate_s: float, reason: Any = FINISH_REASON_STOP) -> GenerateResponse:
    usage = Usage(prompt_tokens_full=9, prompt_tokens=8, completion_tokens=tokens, cached_prompt_tokens=4)
    timings = Timings(time_to_first_token_s=0.5, plan_s=0.5, generate_s=generate_s)
    return GenerateResponse(
        finished=FinishedMessage(choice_index=index, reason=reason, usage=usage, timings=timings),
    )


ACCEPTED = GenerateResponse(accepted=Accepted(request_id="r1", usage=Usage(prompt_tokens_full=9, prompt_tokens=8)))
MIXED = (
    ACCEPTED,
    delta(1, "Some", 1),
    delta(0, "A ", 2, 3),
    delta(1, "thing", 4),
    finished(1, 2, 0.25),
    delta(0, "ball", 5),
    finished(0, 3, 0.75, FINISH_REASON_LENGTH),
)


def saying(*responses: GenerateResponse) -> Any:
    async def say(request: Any, context: Any) -> AsyncIterator[GenerateResponse]:
        for response in responses:
            yield response

    return say


async def test_every_option_reaches_the_wire(tmp_path: Path) -> None:
    assert set(OPTIONS) == set(Sampling.DESCRIPTOR.fields_by_name)
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(None, "?", **OPTIONS)
        assert fake.requests[0].sampling == Sampling(**OPTIONS)
        await client.ask(None, "?", **dict.fromkeys(OPTIONS))
        assert fake.requests[1].sampling == Sampling()


@pytest.mark.parametrize(
    ("question", "options", "told"),
    [
        ("?", {"top_k": 2**40}, "Sampling.top_k must be a 32-bit integer, got 1099511627776"),
        ("?", {"seed": 2**70}, "Sampling.seed must be a 64-bit integer, got 1180591620717411303424"),
        (
            "?",
            {"stop_token_ids": [1, 2**40]},
            "Sampling.stop_token_ids must be a 32-bit integer, got [1, 1099511627776]",
        ),
        ("?", {"temperature": 10**400}, "Sampling.temperature must be a 64-bit float, got 1000"),
        ("?", {"stop": ["\udcff"]}, r"Sampling.stop must be text in Unicode, got ['\udcff']"),
        ("?", {"adapter": "\udcff"}, r"GenerateRequest.adapter must be text in Unicode, got '\udcff'"),
        ("What\udcff", {}, r"Part.text must be text in Unicode, got 'What\udcff'"),
    ],
)
async def test_what_no_request_can_hold_is_refused_by_name_and_unsent(
    tmp_path: Path, question: str, options: Any, told: str
) -> None:
    async with served(tmp_path, moving_ball) as (client, fake):
        with pytest.raises(InvalidRequest, match=re.escape(told)):
            await client.ask(None, question, **options)
        assert not fake.requests


@pytest.mark.parametrize(
    ("media", "told"),
    [
        (Video(data=b"", max_frames=2**33), "FrameSampling.max_frames must be a 32-bit integer, got 8589934592"),
        (Image(data=b"", max_pixels=2**70), "FrameSampling.max_pixels must be a 64-bit integer"),
        (Video(url="http://a.test/\udcff"), "Media.url must be text in Unicode"),
        (Video(server_path="\udcff"), "Media.path must be text in Unicode"),
        (Video(embeds=Embeds(b"", Grid(1, 1, 1), dtype="float32", shape=(2**70, 1))), "Tensor.shape must be a 64-bit"),
    ],
)
async def test_media_that_no_request_can_hold_are_refused_by_name(media: Image | Video, told: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(told)):
        prompt_message([user_turn(media, "?")])


async def test_an_adapter_reaches_the_wire_where_one_is_named(tmp_path: Path) -> None:
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(None, "?", adapter="traffic")
        await client.ask(None, "?", adapter="")  # the service's to refuse
        await client.ask(None, "?")
        told = [request.adapter if request.HasField("adapter") else None for request in fake.requests]
        assert told == ["traffic", "", None]


async def test_choices_are_put_together_by_their_index_and_what_is_said_of_one_is_the_firsts(tmp_path: Path) -> None:
    async with served(tmp_path, saying(*MIXED)) as (client, _):
        answer = await client.ask(None, "?", n=2)
    ball, something = answer.choices
    tops = tuple(((one, -one), (one + 1, -one - 1)) for one in (2, 3, 5))
    assert ball == Choice(0, "A ball", (2, 3, 5), (-2, -3, -5), tops, FinishReason.LENGTH)
    assert (something.index, something.text, something.token_ids) == (1, "Something", (1, 4))
    assert something.reason is FinishReason.STOP
    assert (answer.text, answer.token_ids, answer.logprobs) == (ball.text, ball.token_ids, ball.logprobs)
    assert (answer.top_logprobs, answer.reason, str(answer)) == (ball.top_logprobs, ball.reason, ball.text)


async def test_what_several_answers_cost_is_told_together(tmp_path: Path) -> None:
    async with served(tmp_path, saying(*MIXED)) as (client, _):
        answer = await client.ask(None, "?", n=2)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.cached_prompt_tokens) == (8, 5, 4)
    assert answer.timings.generate_s == 0.75


async def test_events_of_several_answers_come_as_they_happen(tmp_path: Path) -> None:
    async with served(tmp_path, saying(*MIXED)) as (client, _):
        events = [event async for event in client.stream(None, "?", n=2)]
    assert [event.choice_index for event in events if isinstance(event, Delta)] == [1, 0, 1, 0]
    assert [event.choice_index for event in events if isinstance(event, Finished)] == [1, 0]
    assert events[0].usage.cached_prompt_tokens == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "responses",
    [MIXED[:-1], (ACCEPTED, finished(0, 1, 0.5)), (*MIXED, finished(1, 1, 0.5)), (ACCEPTED, finished(2, 1, 0.5))],
    ids=["one without an end", "one missing", "one ended twice", "another's end"],
)
async def test_fewer_or_other_answers_than_were_asked_for_break_the_contract(
    tmp_path: Path, responses: tuple[GenerateResponse, ...]
) -> None:
    async with served(tmp_path, saying(*responses)) as (client, _):
        with pytest.raises(errors.PeerContract, match="ended before all completions were finished"):
            await client.ask(None, "?", n=2)


async def test_likeliest_tokens_without_their_log_probabilities_break_the_contract(tmp_path: Path) -> None:
    lame = DeltaMessage(top_logprobs=[TopLogprobs(token_ids=[1, 2], logprobs=[-0.5])])
    async with served(tmp_path, saying(ACCEPTED, GenerateResponse(delta=lame))) as (client, _):
        with pytest.raises(errors.PeerContract, match="1 log-probabilities of 2 tokens"):
            await client.ask(None, "?", n=2)


async def test_questions_at_once_keep_their_answers_apart(tmp_path: Path) -> None:
    async with served(tmp_path, saying(*MIXED)) as (client, _):
        answers = await asyncio.gather(*(client.ask(None, "?", n=2) for _ in range(4)))
    assert {answer.choices[1].text for answer in answers} == {"Something"}
