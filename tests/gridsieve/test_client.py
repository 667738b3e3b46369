"""GridsieveClient against a hand-written generation service: requests, events, completions and errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from gridsieve import (
    Accepted,
    Choice,
    Delta,
    Finished,
    FinishReason,
    GridsieveClient,
    Message,
    Progress,
    Text,
    Video,
)
from gridsieve.common.channels import REQUEST_ID_KEY
from gridsieve.common.contract import errors
from gridsieve.v1 import encoder_pb2, generation_pb2, generation_pb2_grpc, prompt_pb2
from gridsieve.v1.generation_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, GenerateResponse
from tests.common.loopback import serving


class FakeGeneration(generation_pb2_grpc.GenerationServiceServicer):
    """Answers every request alike and records the requests."""

    def __init__(self, responses: Sequence[GenerateResponse]) -> None:
        self.responses = responses
        self.requests: list[Any] = []
        self.metadata: dict[str, Any] = {}
        self.error: errors.GridsieveError | None = None

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[GenerateResponse]:
        self.requests.append(request)
        self.metadata = dict(context.invocation_metadata())
        if self.error:
            raise self.error
        for response in self.responses:
            yield response


@asynccontextmanager
async def served(
    tmp_path: Path, responses: Sequence[GenerateResponse]
) -> AsyncIterator[tuple[GridsieveClient, FakeGeneration]]:
    fake, address = FakeGeneration(responses), f"unix:{tmp_path}/generation.sock"
    async with serving(address, fake), GridsieveClient(address) as client:
        yield client, fake


def delta(index: int, text: str, *token_ids: int) -> GenerateResponse:
    """Every token's log-probability is minus its id, also among its top tokens: itself and its successor."""
    tops = [{"token_ids": [one, one + 1], "logprobs": [-one, -one - 1]} for one in token_ids]
    sent = {"choice_index": index, "text": text, "token_ids": token_ids, "logprobs": [-one for one in token_ids]}
    return GenerateResponse(delta={**sent, "top_logprobs": tops})


def finished(index: int, tokens: int, generate_s: float, reason: Any = FINISH_REASON_STOP) -> GenerateResponse:
    usage = {"prompt_tokens_full": 9, "prompt_tokens": 8, "completion_tokens": tokens, "cached_prompt_tokens": 4}
    timings = {"time_to_first_token_s": 0.75, "plan_s": 0.25, "decode_s": 0.5, "generate_s": generate_s}
    return GenerateResponse(finished={"choice_index": index, "reason": reason, "usage": usage, "timings": timings})


VIDEO = generation_pb2.MediaUsage(
    modality=prompt_pb2.MODALITY_VIDEO,
    grid=prompt_pb2.Grid(t=4, h=5, w=4),
    num_kept=20,
    repaired_frames=1,
    first_slice_only=True,
)
ACCEPTED = GenerateResponse(
    accepted={"request_id": "r1", "usage": {"prompt_tokens_full": 9, "prompt_tokens": 8, "media": [VIDEO]}}
)
PROGRESS = GenerateResponse(progress=encoder_pb2.MediaProgress(media_index=0, decoded_slices=4, encoded_slices=3))
ONE = (ACCEPTED, PROGRESS, delta(0, "A ", 5), delta(0, "ball", 6), finished(0, 2, 0.5))
TWO = (
    ACCEPTED,
    delta(1, "Some", 1),
    delta(0, "A ", 2, 3),
    delta(1, "thing", 4),
    finished(1, 2, 0.25),
    delta(0, "ball", 5),
    finished(0, 3, 0.75, FINISH_REASON_LENGTH),
)


async def test_stream_yields_typed_events_and_ask_joins_them(tmp_path: Path) -> None:
    async with served(tmp_path, ONE) as (client, _):
        events = [event async for event in client.stream(Video(data=b"film"), "What moves?")]
        answer = await client.ask(Video(data=b"film"), "What moves?")
    assert [type(event) for event in events] == [Accepted, Progress, Delta, Delta, Finished]
    (media,) = events[0].usage.media  # type: ignore[union-attr]
    assert (media.grid.t, media.grid.h, media.grid.w, media.num_kept) == (4, 5, 4, 20)
    assert (media.modality.value, media.repaired_frames, media.first_slice_only) == ("video", 1, True)
    assert events[1] == Progress(media_index=0, decoded_slices=4, encoded_slices=3)
    assert str(answer) == answer.text == "A ball"
    assert (answer.request_id, answer.token_ids, answer.logprobs) == ("r1", (5, 6), (-5, -6))
    assert answer.reason is FinishReason.STOP
    assert (answer.timings.stages_s["plan"], answer.timings.stages_s["decode"]) == (0.25, 0.5)
    assert sum(answer.timings.stages_s.values()) == answer.timings.time_to_first_token_s


async def test_a_replica_that_refuses_every_question_is_not_the_only_one_that_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # replicas are chosen by their addresses, which are the same in every run
    refuses, answers = FakeGeneration([]), FakeGeneration(ONE)
    refuses.error = errors.Unavailable("the engine of generation has ended", "generation")
    addresses = [f"unix:{name}" for name in "ab"]
    async with (
        serving(addresses[0], refuses),
        serving(addresses[1], answers),
        GridsieveClient(",".join(addresses)) as client,
    ):
        for number in range(8):
            answer = await client.ask(Video(data=bytes([number])), "What moves?", timeout_s=20)
            assert answer.text == "A ball"
    assert refuses.requests
    assert len(answers.requests) == 8


async def test_interleaved_completions_are_joined_by_their_index(tmp_path: Path) -> None:
    async with served(tmp_path, TWO) as (client, fake):
        answer = await client.ask(None, "?", n=2)
    assert fake.requests[0].sampling.n == 2
    ball, something = answer.choices
    tops = tuple(((one, -one), (one + 1, -one - 1)) for one in (2, 3, 5))
    assert ball == Choice(0, "A ball", (2, 3, 5), (-2, -3, -5), tops, FinishReason.LENGTH)
    assert (something.index, something.text, something.token_ids) == (1, "Something", (1, 4))
    assert (answer.text, answer.top_logprobs, answer.reason) == (ball.text, ball.top_logprobs, ball.reason)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_prompt_tokens) == (8, 5, 4)
    assert answer.timings.generate_s == 0.75


async def test_history_precedes_the_question_and_a_request_id_is_also_sent_as_metadata_if_it_can_be(
    tmp_path: Path,
) -> None:
    history = [Message("system", (Text("Be brief."),)), Message("assistant", (Text("A cat."),))]
    async with served(tmp_path, ONE) as (client, fake):
        for request_id, in_metadata in (("mine", "mine"), ("naïve\n", None)):
            await client.ask(None, "What colour?", history=history, request_id=request_id)
            assert fake.requests[-1].request_id == request_id
            assert fake.metadata.get(REQUEST_ID_KEY) == in_metadata
    assert [(message.role, message.parts[0].text) for message in fake.requests[0].prompt.messages] == [
        (prompt_pb2.ROLE_SYSTEM, "Be brief."),
        (prompt_pb2.ROLE_ASSISTANT, "A cat."),
        (prompt_pb2.ROLE_USER, "What colour?"),
    ]


# --- errors -----------------------------------------------------------------------------------------------------


LAME = GenerateResponse(delta={"top_logprobs": [{"token_ids": [1, 2], "logprobs": [-0.5]}]})


@pytest.mark.parametrize(
    ("responses", "message"),
    [
        (TWO[:-1], "ended before all completions"),
        ((*TWO, finished(1, 1, 0.5)), "ended before all completions"),
        ((ACCEPTED, finished(2, 1, 0.5)), "ended before all completions"),
        (TWO[1:], "ended before all completions"),
        ((ACCEPTED, LAME), "1 log-probabilities of 2 tokens"),
        ((GenerateResponse(),), "unknown kind of event"),
        ((ACCEPTED, finished(0, 1, 0.5, 0)), "unknown finish reason 0"),
    ],
    ids=["unfinished", "finished twice", "unknown index", "not accepted", "logprobs", "empty", "reason"],
)
async def test_a_stream_that_breaks_the_contract_is_an_error(
    tmp_path: Path, responses: tuple[GenerateResponse, ...], message: str
) -> None:
    async with served(tmp_path, responses) as (client, _):
        with pytest.raises(errors.PeerContract, match=message):
            await client.ask(None, "?", n=2)
