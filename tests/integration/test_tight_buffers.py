"""Services with room for one item and few requests: no deadlock, overload is refused, and SIGTERM drains them."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from demo.checkpoint import TINY
from gridsieve.client.answer import Delta, Finished
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Options, Video
from gridsieve.common.channels import upstream_errors
from gridsieve.common.contract import errors
from gridsieve.common.security.credentials import NO_CREDENTIALS
from gridsieve.common.serving.probe import is_serving
from gridsieve.v1.generation_pb2 import GenerateRequest
from gridsieve.v1.generation_pb2_grpc import GenerationServiceStub
from tests import media
from tests.integration.conftest import metric
from tests.integration.fleet import Stack, running, until

VIDEOS = 3
ITEM_TOKENS = 4 * 4 * 4
EMBED_BYTES = 4
ITEM_BYTES = ITEM_TOKENS * TINY.hidden * EMBED_BYTES
CROWD = 48
PLACES = 24


@pytest.fixture(scope="module")
def tight(tiny_checkpoint: Path) -> Iterator[Stack]:
    """An encoder with room for one item, and generation with room for the media of one request."""
    flags = {
        "encoder": ["--output-buffer-bytes", str(ITEM_BYTES)],
        "generation": [
            *("--media-buffer-bytes", str(VIDEOS * ITEM_BYTES), "--kv-cache-tokens", "1024"),
            *("--max-num-seqs", "8", "--max-waiting-requests", str(PLACES - 8)),
        ],
    }
    with running(tiny_checkpoint, flags=flags) as stack:
        yield stack


@pytest.fixture
async def client(tight: Stack) -> AsyncIterator[GridsieveClient]:
    """At the end the services must hold nothing."""
    async with GridsieveClient(tight.address) as connected:
        yield connected
    for service, name in (
        *(("generation", "kv_blocks_used"), ("generation", "media_buffer_used_bytes")),
        ("encoder", "buffer_used_bytes"),
    ):
        gauge = partial(metric, tight, service, f"gridsieve_{service}_{name}")
        await until(lambda gauge=gauge: gauge() == 0)  # type: ignore[misc]


async def test_requests_of_several_videos_each_do_not_deadlock(client: GridsieveClient) -> None:
    clips = [[Video(data=media.clip(seed=6 * request + video)) for video in range(VIDEOS)] for request in range(6)]
    answers = await asyncio.gather(*(client.ask(each, "What moves?", max_new_tokens=2, timeout_s=90) for each in clips))
    assert [len(answer.usage.media) for answer in answers] == [VIDEOS] * 6


async def test_more_requests_than_places_are_answered_or_refused(client: GridsieveClient) -> None:
    """Of up to three videos each. A refusal says when to retry; no request hangs."""
    clips = [media.clip(8, seed=seed) for seed in range(5)]

    async def one(number: int) -> str:
        videos = [Video(data=data) for data in clips[number % 3 :][: number % (VIDEOS + 1)]]
        options: Options = {"pruning_rate": (0.0, 0.5, 0.75)[number % 3], "max_new_tokens": 1 + number % 9}
        try:
            await client.ask(videos, f"Question {number}?", **options, timeout_s=120)
        except errors.Overloaded as refused:
            return "refused" if refused.retry_after_s > 0 else "refused without a hint"
        return "answered"

    outcomes = Counter(await asyncio.gather(*map(one, range(CROWD))))
    assert outcomes.keys() <= {"answered", "refused"}
    assert outcomes["answered"] >= PLACES / 2
    again = await client.ask(Video(data=clips[0]), "And now?", max_new_tokens=2, timeout_s=30)
    assert again.usage.completion_tokens >= 1


async def refuses_new_requests(stack: Stack) -> None:
    """Returns once health says that it drains and a request is refused for that reason."""
    await until(lambda: not is_serving(stack.address, NO_CREDENTIALS, timeout_s=30))
    async with grpc.aio.insecure_channel(stack.address) as channel:
        call = GenerationServiceStub(channel).Generate(GenerateRequest(), timeout=20)
        with pytest.raises(errors.Unavailable, match=r"^generation is draining$"), upstream_errors("a proxy"):
            await call.read()


async def test_an_answer_completes_while_all_services_drain(tight: Stack) -> None:
    """The last test of the stack."""
    async with GridsieveClient(tight.address) as client:
        clip = Video(data=media.clip())
        stream = client.stream(clip, "What moves?", max_new_tokens=200, stop=["\x00"], timeout_s=60)
        async for event in stream:
            if isinstance(event, Delta):
                break
        for each in tight.services.values():
            each.tell(signal.SIGTERM)
        await refuses_new_requests(tight)
        left = [event async for event in stream]
    assert isinstance(left[-1], Finished)
    assert left[-1].usage.completion_tokens > 1
    assert [each.ended(30) for each in tight.services.values()] == [0, 0, 0]
