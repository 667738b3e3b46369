"""Questions through three real processes: sampling, neighbours, and what caches spare the next question."""

from __future__ import annotations

import asyncio
import io
import re
import struct
from collections import Counter
from typing import Any

import av
import PIL.Image
import pytest
from typer.testing import CliRunner

from framesieve.__main__ import app
from framesieve.client.answer import Answer, FinishReason
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Frames, Image, Message, Text, Video
from tests import media
from tests.integration.conftest import idle, metric
from tests.integration.fleet import Stack

QUESTION = "What moves?"


async def ask(client: FramesieveClient, clip: int, **options: Any) -> Answer:
    """An answer about the clip of that number."""
    asked = {"max_new_tokens": 8, "pruning_rate": 0.5, "temperature": 0.0, "timeout_s": 30.0} | options
    return await client.ask(Video(data=media.clip(seed=clip)), QUESTION, **asked)  # type: ignore[arg-type]


async def test_the_same_request_gives_the_same_answer_alone_and_among_others(client: FramesieveClient) -> None:
    options = {"temperature": 0.8, "logprobs": True, "max_new_tokens": 16}
    alone = [await ask(client, number, seed=number, **options) for number in range(4)]
    together = await asyncio.gather(*(ask(client, number, seed=number, **options) for number in range(4)))
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


async def test_penalties_follow_their_formula_from_raw_log_probabilities(client: FramesieveClient) -> None:
    presence, frequency = 0.5, 0.75
    penalties = {"presence_penalty": presence, "frequency_penalty": frequency}
    answer = await ask(client, 0, max_new_tokens=16, logprobs=True, top_logprobs=20, **penalties)
    counts: Counter[int] = Counter()
    for token_id, logprob, top in zip(answer.token_ids, answer.logprobs, answer.top_logprobs, strict=True):
        # The answer has fewer than 20 tokens, so the best token that is not in it yet is among the 20 likeliest.
        scores = {one: value - presence * (counts[one] > 0) - frequency * counts[one] for one, value in top}
        assert token_id == max(scores, key=scores.__getitem__)
        assert dict(top)[token_id] == logprob
        counts[token_id] += 1
    assert answer.token_ids != (await ask(client, 0, max_new_tokens=16)).token_ids


async def test_a_stop_token_ends_an_answer_and_the_end_token_of_the_model_can_be_ignored(
    client: FramesieveClient,
) -> None:
    # At this temperature all tokens are about equally likely, so one of the answers meets the model's end token.
    wild = {"temperature": 100.0, "max_new_tokens": 100}
    several = await ask(client, 0, **wild, seed=1, n=8)
    ended = next(choice for choice in several.choices if choice.reason is FinishReason.STOP)
    again = {**wild, "seed": 1 + ended.index, "ignore_eos": True}
    onward = await ask(client, 0, **again)
    assert (len(onward.token_ids), onward.reason) == (100, FinishReason.LENGTH)
    assert onward.token_ids[: len(ended.token_ids)] == ended.token_ids
    stopped = await ask(client, 0, **again, stop_token_ids=[ended.token_ids[-1]])
    assert (stopped.token_ids, stopped.text, stopped.reason) == (ended.token_ids, ended.text, ended.reason)


async def test_a_picture_of_several_pieces_is_answered(client: FramesieveClient) -> None:
    """1204 × 1204 pixels are one slice of 4.1 MiB, sent by at most 1 MiB."""
    picture = Image(data=media.picture(1204, 1204), max_pixels=1204 * 1204)
    answer = await client.ask(picture, QUESTION, max_new_tokens=1, timeout_s=60)
    assert str(answer.usage.media[0].grid) == "1×43×43"


async def test_clips_that_travel_in_pieces_are_answered_like_small_ones(client: FramesieveClient) -> None:
    """A box that readers skip makes the clips 1.5 and 3 MiB large: pieces of at most 1 MiB follow the prompt."""
    clips = [media.clip(seed=61), media.clip(seed=62)]
    padding = [struct.pack(">I4s", size, b"free") + bytes(size - 8) for size in (3 * 2**19, 3 * 2**20)]
    large = [clip + free for clip, free in zip(clips, padding, strict=True)]
    small_answer, large_answer = [
        await client.ask(
            [Video(data=first), Image(data=media.picture(56, 56)), Video(data=second)],
            QUESTION,
            max_new_tokens=8,
            temperature=0,
            logprobs=True,
        )
        for first, second in (clips, large)
    ]
    assert large_answer.token_ids == small_answer.token_ids
    assert large_answer.logprobs == pytest.approx(small_answer.logprobs, abs=1e-4)


async def test_pictures_are_answered_like_the_clip_whose_frames_they_are(
    stack: Stack, client: FramesieveClient
) -> None:
    """In one message and, 1.6 MiB large, in pieces between the services. The second question encodes nothing."""
    options: Any = {"max_new_tokens": 8, "temperature": 0, "logprobs": True, "pruning_rate": 0.5}
    clip = media.clip(seed=63, width=224, height=224)
    times_s = tuple(number / 4 for number in range(16))
    by_clip = await client.ask(Video(data=clip, fps=4), QUESTION, **options)
    for file_format in ("PNG", "BMP"):
        pictures = _frames_of(clip, file_format)
        assert (sum(map(len, pictures)) > 2**20) == (file_format == "BMP")
        video = Video(frames=Frames(pictures, times_s))
        by_pictures = await client.ask(video, QUESTION, **options)
        assert by_pictures.token_ids == by_clip.token_ids
        assert by_pictures.logprobs == pytest.approx(by_clip.logprobs, abs=1e-4)
        assert by_pictures.usage.media == by_clip.usage.media
        before = await work_done(stack)
        assert (await client.ask(video, QUESTION, **options)).token_ids == by_clip.token_ids
        assert await work_done(stack) == before


def _frames_of(clip: bytes, file_format: str) -> tuple[bytes, ...]:
    """The frames of a clip as pictures without loss."""
    files = []
    with av.open(io.BytesIO(clip)) as container:
        for frame in container.decode(video=0):
            files.append(io.BytesIO())
            PIL.Image.fromarray(frame.to_ndarray(format="rgb24")).save(files[-1], file_format)
    return tuple(file.getvalue() for file in files)


# --- caches -------------------------------------------------------------------------------------------------------


async def work_done(stack: Stack) -> dict[str, float]:
    """Decoded frames, items that the encoder was asked for, and look-ups in its cache."""
    await idle(stack)
    return {
        "frames": metric(stack, "preprocessing", "framesieve_preprocessing_frames_total"),
        "items": metric(stack, "encoder", "framesieve_encoder_items_total"),
        "lookups": metric(stack, "encoder", "framesieve_encoder_cache_lookups_total"),
    }


@pytest.mark.parametrize("rate", [0.0, 0.75])
async def test_a_second_question_about_a_clip_decodes_encodes_and_sends_nothing(
    stack: Stack, client: FramesieveClient, rate: float
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


async def test_a_question_at_another_rate_takes_embeddings_from_the_cache_of_the_encoder(
    stack: Stack, client: FramesieveClient
) -> None:
    await ask(client, 41, pruning_rate=0.25)
    before = await work_done(stack)
    await ask(client, 41, pruning_rate=0.5)
    after = await work_done(stack)
    assert after["frames"] == before["frames"]
    assert after["items"] == before["items"] + 1


async def test_the_next_turn_of_a_conversation_computes_only_what_is_new(
    stack: Stack, client: FramesieveClient
) -> None:
    first = await ask(client, 42)
    before = await work_done(stack)
    clip = Video(data=media.clip(seed=42))
    turns = (Message("user", (clip, Text(QUESTION))), Message("assistant", (Text(first.text),)))
    second = await client.ask(None, "Why?", history=turns, pruning_rate=0.5, max_new_tokens=8, temperature=0)
    assert await work_done(stack) == before
    assert second.usage.cached_prompt_tokens > first.usage.prompt_tokens - 16


@pytest.mark.parametrize("name", ["preprocessing", "encoder"])
def test_the_address_of_another_service_is_reported_with_the_service_that_listens_there(
    stack: Stack, name: str
) -> None:
    result = CliRunner().invoke(app, ["ask", QUESTION, "--server", stack.addresses[name]])
    assert (result.exit_code, result.stdout) == (1, "")
    assert re.fullmatch(rf"UNAVAILABLE: .*\bthis is the {name}\b.* generation .*50053\n", result.stderr)
