"""A cache salt: what was computed for a request is found by requests of the same salt alone, by every door."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from gridsieve import GridsieveClient, InvalidRequest, Video
from tests import media
from tests.integration.conftest import idle, metric
from tests.integration.fleet import Stack
from tests.integration.gateway import Gateway, data_url, question, video

OPTIONS: Any = {"max_new_tokens": 8, "temperature": 0, "logprobs": True, "pruning_rate": 0.5, "pruning_method": "evs"}
# Of a clip: sampled frames, and slices of two frames.
FRAMES, SLICES = 8, 4
TOO_LONG, UNPRINTABLE = "x" * 257, "a\nb"


@pytest.fixture(scope="module")
def door(drawing_door: Gateway) -> Gateway:
    return drawing_door


async def work_done(stack: Stack) -> tuple[int, int]:
    """How many frames were decoded, and how many slices ran through the tower."""
    await idle(stack)
    frames = metric(stack, "preprocessing", "gridsieve_preprocessing_frames_total")
    return int(frames), int(metric(stack, "encoder", "gridsieve_encoder_batch_slices_sum"))


async def test_requests_of_another_salt_find_nothing_and_are_answered_alike(
    stack: Stack, client: GridsieveClient
) -> None:
    clip, answers = Video(data=media.clip(FRAMES, fps=2, seed=71)), []
    for salt in (None, "alice", "bob"):
        frames, slices = await work_done(stack)
        first = await client.ask(clip, "What moves?", cache_salt=salt, **OPTIONS)
        assert first.usage.cached_prompt_tokens == 0
        assert min(first.timings.decode_s, first.timings.encode_s) > 0
        done = await work_done(stack)
        assert done == (frames + FRAMES, slices + SLICES)
        again = await client.ask(clip, "What moves?", cache_salt=salt, **OPTIONS)
        assert again.usage.cached_prompt_tokens > 0
        await client.ask(clip, "What moves?", cache_salt=salt, **OPTIONS | {"pruning_rate": 0.25})
        assert await work_done(stack) == done
        answers += [first, again]
    for other in answers[1:]:
        assert other.token_ids == answers[0].token_ids
        assert other.logprobs == pytest.approx(answers[0].logprobs, abs=1e-4)


async def test_a_prompt_of_text_is_found_by_its_salt_alone(client: GridsieveClient) -> None:
    for salt in (None, "alice", "bob"):
        first, again = [await client.ask(None, "Why? " * 64, cache_salt=salt, **OPTIONS) for _ in range(2)]
        assert (first.usage.cached_prompt_tokens, again.usage.cached_prompt_tokens > 0) == (0, True)


async def test_concurrent_requests_of_different_salts_share_no_encoding(stack: Stack, client: GridsieveClient) -> None:
    frames, slices = await work_done(stack)
    clip = Video(data=media.clip(FRAMES, fps=2, seed=72))
    await asyncio.gather(*(client.ask(clip, "?", cache_salt=salt, **OPTIONS) for salt in ("alice", "bob")))
    assert await work_done(stack) == (frames + 2 * FRAMES, slices + 2 * SLICES)


async def test_every_http_endpoint_takes_a_salt(stack: Stack, http: httpx.Client) -> None:
    url = data_url("video/mp4", media.clip(FRAMES, fps=2, seed=74))
    content = [{"type": "input_file", "file_data": url}, {"type": "input_text", "text": "What?"}]
    pruning: dict[str, Any] = {"pruning": {"rate": 0.5}}
    chat = question(video(url), "What?", **pruning)
    response = {"input": [{"role": "user", "content": content}], "max_output_tokens": 8, **pruning}

    def cached(path: str, body: dict[str, Any], salt: str) -> int:
        usage = http.post(path, json=body | {"cache_salt": salt}).raise_for_status().json()["usage"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        return int(details["cached_tokens"])

    doors = ("/v1/chat/completions", chat), ("/v1/responses", response)
    for (path, body), salt in zip(doors, ("alice", "bob"), strict=True):
        before = await work_done(stack)
        assert await asyncio.to_thread(cached, path, body, salt) == 0
        done = await work_done(stack)
        assert done == (before[0] + FRAMES, before[1] + SLICES)
        kept = await asyncio.to_thread(http.post, "/v1/gridsieve/kept", json=chat | {"cache_salt": salt})
        assert kept.status_code == 200
        for other, its_body in doors:
            assert await asyncio.to_thread(cached, other, its_body, salt) > 0
        assert await work_done(stack) == done


async def test_a_salt_that_is_too_long_or_not_printable_is_refused(client: GridsieveClient, http: httpx.Client) -> None:
    for salt in (TOO_LONG, UNPRINTABLE):
        with pytest.raises(InvalidRequest, match="at most 256 printable characters") as error:
            await client.ask(None, "Why?", cache_salt=salt)
        assert error.value.field == "prompt.cache_salt"
        for path, body in (("/v1/chat/completions", question("Why?")), ("/v1/responses", {"input": "Why?"})):
            refused = await asyncio.to_thread(http.post, path, json=body | {"cache_salt": salt})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "cache_salt")
