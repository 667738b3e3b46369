"""Generate over gRPC with a real engine: order of responses, statuses, and release of resources."""

from __future__ import annotations

import asyncio
import sys
import weakref
from contextlib import aclosing
from dataclasses import replace
from fractions import Fraction
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import structlog
import torch
from tokenizers import Tokenizer

from gridsieve.common.channels import REQUEST_ID_KEY
from gridsieve.common.contract.errors import MediaDamaged
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.request.request import Request
from gridsieve.v1 import generation_pb2, prompt_pb2
from gridsieve.v1.generation_pb2 import GenerateRequest, LiveRequest, Sampling
from tests.families import load_reference
from tests.generation.generation_peers import embeds_messages, eventually, prompt_message
from tests.generation.generation_service import (
    HALF,
    HIDDEN,
    KEPT,
    LIMIT,
    TEXT_AFTER,
    TEXT_BEFORE,
    VIDEO,
    Service,
    answers,
    refused,
    service_of,
    token_ids,
)
from tests.oracle import Item, Text, expected_logprobs, expected_sequence


async def test_responses_are_accepted_then_progress_then_tokens_then_finished(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        sampling = Sampling(max_new_tokens=5, logprobs=True, top_logprobs=2)
        responses = await answers(service.ask(request_id="mine-7", sampling=sampling))
        await eventually(service.idle)
    kinds = [kind for kind, _ in groupby(responses, key=lambda response: response.WhichOneof("response"))]
    assert kinds == ["accepted", "progress", "delta", "finished"]
    accepted, finished = responses[0].accepted, responses[-1].finished
    assert accepted.request_id == "mine-7"
    assert service.encoder.metadata[0][REQUEST_ID_KEY] == "mine-7"
    full = TEXT_BEFORE + VIDEO[1].tokens + TEXT_AFTER
    for usage, completion, repaired in ((accepted.usage, 0, 0), (finished.usage, 5, 2)):
        assert (usage.prompt_tokens_full, usage.prompt_tokens) == (full, full - 12)
        assert usage.completion_tokens == completion
        [media] = usage.media
        assert (media.num_kept, media.repaired_frames, media.first_slice_only) == (12, repaired, False)
        assert (media.grid.t, media.grid.h, media.grid.w) == (4, 2, 3)
    assert finished.reason == generation_pb2.FINISH_REASON_LENGTH
    deltas = [response.delta for response in responses[2:-1]]
    assert sum(len(delta.token_ids) for delta in deltas) == 5
    for delta in deltas:
        for token, logprob, top in zip(delta.token_ids, delta.logprobs, delta.top_logprobs, strict=True):
            assert (token, logprob) == (top.token_ids[0], top.logprobs[0])
            assert 0 > top.logprobs[0] > top.logprobs[1]


async def test_kept_tokens_keep_the_positions_of_the_full_prompt(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        responses = await answers(service.ask(sampling=Sampling(max_new_tokens=5, logprobs=True)))
        ids = service.encoder.plan.input_ids.tolist()
    embeds = np.zeros((VIDEO[1].tokens, HIDDEN), np.float32)
    embeds[KEPT] = np.random.default_rng(5).standard_normal((len(KEPT), HIDDEN), np.float32)
    video = Item(4, 2, 3, Fraction(1), embeds, rate=0.5, linear=True)
    parts = [Text(tuple(ids[:TEXT_BEFORE])), video, Text(tuple(ids[-TEXT_AFTER:]))]
    model = load_reference("qwen2_5_vl", tiny_checkpoint)
    said = token_ids(responses)
    expected = expected_sequence(parts, [KEPT], pad_id=0)
    reference = expected_logprobs(model.model.language_model, model.lm_head, expected, [video], said)
    logprobs = [each for response in responses for each in response.delta.logprobs]
    assert said == reference.argmax(dim=-1).tolist()
    assert logprobs == pytest.approx(reference.max(dim=-1).values.tolist(), abs=1e-4)


async def test_invalid_requests_are_refused_and_the_next_one_is_served(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:

        async def check_invalid(message: str, reason: str = "INVALID_REQUEST", **fields: Any) -> None:
            code, found, text = await refused(service.ask(**fields))
            assert (code, found) == (grpc.StatusCode.INVALID_ARGUMENT, reason)
            assert message in text

        await check_invalid("request_id must be at most 128 printable ASCII characters", request_id="x" * 129)
        await check_invalid("request_id must be at most 128 printable ASCII characters", request_id="a\nb")
        await check_invalid("sampling.n must be between 1 and 16, got 17", sampling=Sampling(n=17))
        await check_invalid(
            "adapter must be unset, because generation has loaded none (--adapters), got ''", adapter=""
        )
        await check_invalid("rate", pruning=prompt_pb2.Pruning(rate=1.0))
        assert service.encoder.metadata == []
        await check_invalid("max_pixels ", "PROMPT_TOO_LONG", sampling=Sampling(max_new_tokens=LIMIT - 29))
        await check_invalid("sampling.stop_token_ids[0] must be at least 0", sampling=Sampling(stop_token_ids=[10**6]))
        await eventually(service.idle)
        assert len(token_ids(await answers(service.ask()))) == 5
        service.room.size_bytes = 2000
        message = f"{len(KEPT) * HIDDEN * 4} bytes; --media-buffer-bytes holds 2000; frame_sampling.max_pixels"
        await check_invalid(message, "PROMPT_TOO_LONG")
        assert [each for each in service.encoder.selections if each] == [[0]]


async def test_an_answer_ends_before_its_stop_string(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:

        async def text(*stop: str) -> tuple[str, int]:
            sampling = Sampling(max_new_tokens=40, temperature=1.0, seed=3, stop=stop)
            responses = await answers(service.ask_text(sampling=sampling))
            return "".join(each.delta.text for each in responses), responses[-1].finished.reason

        whole, reason = await text()
        assert reason == generation_pb2.FINISH_REASON_LENGTH
        stop = whole[len(whole) // 2 :][:3]
        assert await text(stop) == (whole[: whole.find(stop)], generation_pb2.FINISH_REASON_STOP)
        # Text that may begin a stop string is held back, but not lost.
        assert await text(whole[-2:] + "never") == (whole, generation_pb2.FINISH_REASON_LENGTH)


async def test_the_least_length_biases_and_bad_words_hold_for_an_answer(tmp_path: Path, tiny_checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    async with service_of(tmp_path, tiny_checkpoint) as service:

        async def ids(**fields: Any) -> list[int]:
            sampling = Sampling(max_new_tokens=40, temperature=1.0, seed=3, **fields)
            return token_ids(await answers(service.ask_text(sampling=sampling)))

        free = await ids()
        ends = free[2:4]
        assert len(await ids(stop_token_ids=ends)) <= 3
        longer = await ids(stop_token_ids=ends, min_new_tokens=9)
        assert len(longer) > 9
        assert not set(ends) & set(longer[:9])
        assert len(await ids(stop=[tokenizer.decode(free[:8])[0]])) < 9
        assert len(await ids(stop=[tokenizer.decode(free[:8])[0]], min_new_tokens=9)) >= 9
        assert await ids(logit_bias={7: 100}) == [7] * 40
        assert not set(free) & set(await ids(logit_bias=dict.fromkeys(free, -100)))
        pair, word = next(
            (pair, word)
            for pair, word in ((pair, tokenizer.decode(pair)) for pair in pairwise(free))
            if tuple(tokenizer.encode(word).ids) == pair
        )
        assert pair not in pairwise(await ids(bad_words=[word]))


async def test_each_of_n_answers_is_that_of_its_seed_alone(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:

        def ask(seed: int, n: int) -> Any:
            drawn = Sampling(max_new_tokens=20, temperature=1.0, repetition_penalty=1.3, seed=seed, n=n)
            return answers(service.ask(sampling=drawn))

        together = await ask(5, 3)
        for index in range(3):
            alone = token_ids(await ask(5 + index, 1))
            assert token_ids([each for each in together if each.delta.choice_index == index]) == alone
        finished = [each.finished for each in together if each.HasField("finished")]
        assert sorted(each.choice_index for each in finished) == [0, 1, 2]
        assert [each.usage.completion_tokens for each in finished] == [20] * 3


async def test_upstream_errors_reach_the_caller(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint, fault=MediaDamaged("9 of 10 frames are broken")) as service:
        refusal = await refused(service.ask())
        assert refusal == (grpc.StatusCode.INVALID_ARGUMENT, "MEDIA_DAMAGED", "9 of 10 frames are broken")
        await eventually(service.idle)


class Caller:
    """The context of a call made directly, whose responses can be read arbitrarily slowly."""

    def time_remaining(self) -> None:
        return None

    def invocation_metadata(self) -> None:
        return None


def video_request(service: Service, new_tokens: int) -> GenerateRequest:
    request = GenerateRequest(
        prompt=prompt_message(service.encoder.plan), sampling=Sampling(max_new_tokens=new_tokens), pruning=HALF
    )
    structlog.contextvars.bind_contextvars(request_id="direct")
    return request


async def test_a_client_that_stops_reading_holds_no_bytes_of_media(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        request = video_request(service, 5)
        async with aclosing(service.servicer.Generate(request, Caller())) as responses:
            assert (await anext(responses)).HasField("accepted")
            async with asyncio.timeout(10):
                while not service.room.held_bytes:
                    await asyncio.sleep(0)
                while service.room.held_bytes:
                    await asyncio.sleep(0.01)
            left = [response async for response in responses]
        assert len(token_ids(left)) == 5
        assert left[-1].HasField("finished")


async def test_inline_media_and_embeddings_are_freed_once_delivered(tmp_path: Path, tiny_checkpoint: Path) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        request = video_request(service, 9)
        messages = [request, request.prompt, request.pruning]
        before = [sys.getrefcount(each) for each in messages]
        delivered: list[weakref.ref[torch.Tensor]] = []
        deliver = service.engine.deliver

        def note(question: Request, item: MediaItem) -> None:
            delivered.append(weakref.ref(item.embeds))
            deliver(question, replace(item, embeds=item.embeds.clone()))

        service.engine.deliver = note  # type: ignore[method-assign]
        async with aclosing(service.servicer.Generate(request, Caller())) as responses:
            while not (await anext(responses)).HasField("delta"):
                pass
            await eventually(lambda: [sys.getrefcount(each) for each in messages] == before)
            assert [embeds() for embeds in delivered] == [None]


async def test_usage_reports_a_rate_that_keeps_only_the_first_slice(tmp_path: Path, tiny_checkpoint: Path) -> None:
    embeds = np.ones((1, 6, HIDDEN), np.float32)
    async with service_of(tmp_path, tiny_checkpoint, items=embeds_messages(0, embeds, range(6))) as service:
        # At this rate each method keeps six tokens, but only EVS those of the first slice.
        for method, expected in (("evs", True), ("vidcom2", False), ("vcast", False)):
            responses = await answers(service.ask(pruning=prompt_pb2.Pruning(rate=0.75, method=method)))
            assert [each.first_slice_only for each in responses[0].accepted.usage.media] == [expected]


async def test_live_sessions_are_refused_where_the_model_is_not_served_live(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    async with service_of(tmp_path, tiny_checkpoint) as service:
        for first, expected in (
            (LiveRequest(open={}), "live sessions are served for the model types qwen2_5_vl, "),
            (LiveRequest(close={}), "the first request of a live session must open it"),
        ):
            call = service.stub.Live(iter([first]))
            code, _, text = await refused(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert expected in text
