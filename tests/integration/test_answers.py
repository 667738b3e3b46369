"""Questions through three real processes: the order of events, sampling, and what caches spare the next question."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import pytest

from common.channels import open_channel
from common.contract import errors
from common.contract.plan import Modality
from common.contract.tensors import MAX_PIECE_BYTES
from framesieve.cli.launcher import LocalStack
from framesieve.client.answer import Accepted, Answer, Delta, Finished, FinishReason, Progress
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Message, Text, Video
from framesieve.v1 import preprocessing_pb2, preprocessing_pb2_grpc, prompt_pb2
from tests import media
from tests.integration.conftest import KV_CACHE_TOKENS, idle, metric

QUESTION = "What moves?"
TOKENS = 16


async def ask(client: FramesieveClient, clip: int = 0, **options: Any) -> Answer:
    """An answer about the clip of that number."""
    asked = {"max_new_tokens": TOKENS, "pruning_rate": 0.5, "timeout_s": 30.0} | options
    return await client.ask(Video(data=media.clip(seed=clip)), QUESTION, **asked)  # type: ignore[arg-type]


async def test_the_events_of_an_answer_come_in_order(client: FramesieveClient) -> None:
    video = Video(data=media.clip(16, fps=4, seed=50))
    options: dict[str, Any] = {"pruning_rate": 0.5, "max_new_tokens": 8, "request_id": "mine"}
    events = [event async for event in client.stream(video, QUESTION, **options)]
    kinds = [type(event) for event in events]
    assert kinds[0] is Accepted
    assert kinds[-1] is Finished
    assert Progress in kinds
    assert kinds.index(Delta) > max(i for i, kind in enumerate(kinds) if kind is Progress)
    accepted, finished = events[0], events[-1]
    assert isinstance(accepted, Accepted)
    assert isinstance(finished, Finished)
    assert accepted.request_id == "mine"
    # 4 s at 2 frames a second: 8 frames, 4 slices of 4 × 4 tokens, half of which are kept.
    (item,) = finished.usage.media
    assert (item.modality, str(item.grid), item.kept_tokens) == (Modality.VIDEO, "4×4×4", 32)
    assert finished.usage.prompt_tokens_full - finished.usage.prompt_tokens == 32


async def test_the_same_request_gives_the_same_answer_alone_and_among_others(client: FramesieveClient) -> None:
    options = {"temperature": 0.8, "logprobs": True}
    alone = [await ask(client, number, seed=number, **options) for number in range(4)]
    together = await asyncio.gather(*(ask(client, number, seed=number, **options) for number in range(4)))
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_a_path_below_the_media_root_is_read_and_the_answer_says_what_is_left(client: FramesieveClient) -> None:
    answer = await client.ask(Video(server_path="clip.mp4"), QUESTION, pruning_rate=0.75, max_new_tokens=1)
    (item,) = answer.usage.media
    assert (item.modality, item.first_slice_only) == (Modality.VIDEO, True)
    assert answer.reason is FinishReason.LENGTH


async def test_a_slice_of_more_than_five_mib_crosses_in_pieces(stack: LocalStack) -> None:
    """A picture of 1400 × 1400 pixels is one slice of 5.6 MiB."""
    request = preprocessing_pb2.PreprocessRequest()
    message = request.prompt.messages.add(role=prompt_pb2.ROLE_USER)
    message.parts.add().image.data = media.picture(1400, 1400)
    message.parts[0].image.frame_sampling.max_pixels = 1400 * 1400
    everything = preprocessing_pb2.PreprocessRequest(select=prompt_pb2.Select(all=True))
    received = 0
    async with open_channel(stack.addresses["preprocessing"]) as channel:
        stub = preprocessing_pb2_grpc.PreprocessingServiceStub(channel)
        async for response in stub.Preprocess(iter([request, everything])):
            chunk = response.frames.chunk
            if response.WhichOneof("response") == "frames":
                assert chunk.offset_bytes == received
                assert len(chunk.data) <= MAX_PIECE_BYTES
                received += len(chunk.data)
                shape = list(chunk.shape)
    assert shape[0] == 1
    assert received == math.prod(shape) > 5 * 2**20


async def test_a_prompt_longer_than_the_cache_is_refused_before_anything_is_decoded(
    stack: LocalStack, client: FramesieveClient
) -> None:
    await idle(stack)
    decoded = metric(stack, "preprocessing", "framesieve_stage_busy_seconds_count", stage="decode")
    many = [Video(data=media.clip(256, fps=4, seed=seed)) for seed in range(5)]
    with pytest.raises(errors.PromptTooLong, match=str(KV_CACHE_TOKENS)):
        await client.ask(many, QUESTION, max_new_tokens=1)
    await idle(stack)
    assert metric(stack, "preprocessing", "framesieve_stage_busy_seconds_count", stage="decode") == decoded


# --- sampling -----------------------------------------------------------------------------------------------------


async def test_penalties_follow_their_formula_from_raw_log_probabilities(client: FramesieveClient) -> None:
    presence, frequency = 0.5, 0.75
    penalties = {"presence_penalty": presence, "frequency_penalty": frequency}
    answer = await ask(client, temperature=0.0, logprobs=True, top_logprobs=20, **penalties)
    counts: Counter[int] = Counter()
    for token_id, logprob, top in zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=True):
        # The answer has fewer than 20 tokens, so the best token that is not in it yet is among the 20 likeliest.
        scores = {one: value - presence * (counts[one] > 0) - frequency * counts[one] for one, value in top}
        assert token_id == max(scores, key=scores.__getitem__)
        assert dict(top)[token_id] == logprob
        assert [value for _, value in top] == sorted((value for _, value in top), reverse=True)
        counts[token_id] += 1
    assert answer.token_ids != (await ask(client, temperature=0.0)).token_ids


async def test_a_seed_gives_the_same_answer_with_and_without_log_probabilities(client: FramesieveClient) -> None:
    drawn = {"temperature": 1.0, "min_p": 0.02, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 11}
    plain = await ask(client, **drawn)
    with_logprobs = await ask(client, **drawn, logprobs=True, top_logprobs=5)
    assert with_logprobs.token_ids == plain.token_ids
    assert [len(top) for top in with_logprobs.top_logprobs] == [5] * len(plain.token_ids)
    assert plain.logprobs == plain.top_logprobs == ()
    assert (await ask(client, **drawn | {"seed": 12})).token_ids != plain.token_ids


async def test_n_answers_compute_the_prompt_once_and_each_equals_that_of_its_seed(
    stack: LocalStack, client: FramesieveClient
) -> None:
    items = (await work_done(stack))["items"]
    together = await ask(client, 43, temperature=1.0, seed=21, n=3)
    assert (await work_done(stack))["items"] == items + 1
    assert [choice.index for choice in together.choices] == [0, 1, 2]
    for choice in together.choices:
        alone = await ask(client, 43, temperature=1.0, seed=21 + choice.index)
        assert (alone.text, alone.token_ids, alone.reason) == (choice.text, choice.token_ids, choice.reason)
    assert len({choice.token_ids for choice in together.choices}) == 3
    assert together.usage.completion_tokens == sum(len(choice.token_ids) for choice in together.choices)


async def test_a_stop_token_ends_an_answer_and_the_end_token_of_the_model_can_be_ignored(
    client: FramesieveClient,
) -> None:
    # At this temperature all tokens are about equally likely, so one of the answers meets the model's end token.
    wild = {"temperature": 100.0, "max_new_tokens": 100}
    several = await ask(client, **wild, seed=1, n=8)
    ended = next(choice for choice in several.choices if choice.reason is FinishReason.STOP)
    end, seed = ended.token_ids[-1], 1 + ended.index
    onward = await ask(client, **wild, seed=seed, ignore_eos=True)
    assert (len(onward.token_ids), onward.reason) == (100, FinishReason.LENGTH)
    assert onward.token_ids[: len(ended.token_ids)] == ended.token_ids
    stopped = await ask(client, **wild, seed=seed, ignore_eos=True, stop_token_ids=[end])
    assert (stopped.token_ids, stopped.text, stopped.reason) == (ended.token_ids, ended.text, ended.reason)
    first = ended.token_ids[0]
    early = await ask(client, **wild, seed=seed, stop_token_ids=[first])
    assert (early.token_ids, early.text, early.reason) == ((first,), "", FinishReason.STOP)


async def test_a_sampling_option_out_of_range_is_named_and_the_next_request_is_served(client: FramesieveClient) -> None:
    with pytest.raises(errors.InvalidRequest, match=r"sampling\.n must be between 1 and 16, got 17"):
        await ask(client, n=17)
    assert (await ask(client, max_new_tokens=2)).usage.completion_tokens >= 1


# --- caches -------------------------------------------------------------------------------------------------------


async def work_done(stack: LocalStack) -> dict[str, float]:
    """Decoded frames, items that the encoder was asked for, and look-ups in its cache."""
    await idle(stack)
    return {
        "frames": metric(stack, "preprocessing", "framesieve_preprocessing_frames_total"),
        "items": metric(stack, "encoder", "framesieve_encoder_items_total"),
        "lookups": metric(stack, "encoder", "framesieve_encoder_cache_lookups_total"),
    }


@pytest.mark.parametrize("rate", [0.0, 0.75])
async def test_a_second_question_about_a_clip_decodes_encodes_and_sends_nothing(
    stack: LocalStack, client: FramesieveClient, rate: float
) -> None:
    video, options = Video(data=media.clip(seed=round(100 * rate) + 1)), {"max_new_tokens": 8, "temperature": 0}
    first = await client.ask(video, QUESTION, pruning_rate=rate, **options)  # type: ignore[arg-type]
    before = await work_done(stack)
    again = await client.ask(video, QUESTION, pruning_rate=rate, **options)  # type: ignore[arg-type]
    other = await client.ask(video, "And of what colour is it?", pruning_rate=rate, **options)  # type: ignore[arg-type]
    assert await work_done(stack) == before
    assert first.usage.cached_prompt_tokens == 0
    assert again.token_ids == first.token_ids
    for answer in (again, other):
        assert answer.usage.cached_prompt_tokens > 0
        assert answer.usage.media == first.usage.media
        assert answer.timings.encode_s == answer.timings.transfer_s == 0


async def test_a_question_at_another_rate_takes_embeddings_from_the_cache_of_the_encoder(
    stack: LocalStack, client: FramesieveClient
) -> None:
    await ask(client, 41, pruning_rate=0.25, max_new_tokens=2)
    before = await work_done(stack)
    await ask(client, 41, pruning_rate=0.5, max_new_tokens=2)
    after = await work_done(stack)
    assert after["frames"] == before["frames"]
    assert after["items"] == before["items"] + 1


async def test_the_next_turn_of_a_conversation_computes_only_what_is_new(
    stack: LocalStack, client: FramesieveClient
) -> None:
    video = Video(data=media.clip(seed=42))
    first = await client.ask(video, QUESTION, pruning_rate=0.5, max_new_tokens=8, temperature=0)
    before = await work_done(stack)
    turns = (Message("user", (video, Text(QUESTION))), Message("assistant", (Text(first.text),)))
    second = await client.ask(None, "Why?", history=turns, pruning_rate=0.5, max_new_tokens=8, temperature=0)
    assert await work_done(stack) == before
    assert second.usage.cached_prompt_tokens > first.usage.prompt_tokens - 16
