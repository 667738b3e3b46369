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

from common.channels import upstream_errors
from common.contract import errors
from common.security.credentials import NO_CREDENTIALS
from common.serving.probe import is_serving
from demo.checkpoint import TINY
from framesieve.cli.launcher import LocalStack
from framesieve.client.answer import Delta, Finished
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Video
from framesieve.v1.generation_pb2 import GenerateRequest
from framesieve.v1.generation_pb2_grpc import GenerationServiceStub
from tests import media
from tests.integration.conftest import metric, running, settles

VIDEOS = 3
ITEM_TOKENS = 4 * 4 * 4
EMBED_BYTES = 4
ITEM_BYTES = ITEM_TOKENS * TINY.hidden * EMBED_BYTES
CROWD = 200
PLACES = 48


@pytest.fixture(scope="module")
def tight(checkpoint: Path) -> Iterator[LocalStack]:
    """An encoder with room for one item, and generation with room for the media of one request."""
    flags = {
        "encoder": ["--output-buffer-bytes", str(ITEM_BYTES)],
        "generation": [
            *("--media-buffer-bytes", str(VIDEOS * ITEM_BYTES), "--kv-cache-tokens", "1024"),
            *("--max-num-seqs", "8", "--max-waiting-requests", str(PLACES - 8)),
        ],
    }
    with running(checkpoint, flags=flags) as stack:
        yield stack


@pytest.fixture
async def client(tight: LocalStack) -> AsyncIterator[FramesieveClient]:
    """At the end the services must hold nothing."""
    async with FramesieveClient(tight.address) as connected:
        yield connected
    for name in ("generation_kv_blocks_used", "generation_media_buffer_used_bytes", "encoder_room_used_bytes"):
        assert await settles(partial(metric, tight, name.split("_")[0], f"framesieve_{name}"), 0)


async def test_eight_requests_of_several_videos_each_do_not_deadlock(client: FramesieveClient) -> None:
    asked = [
        client.ask(
            [Video(data=media.clip(seed=8 * request + video)) for video in range(VIDEOS)],
            "What moves?",
            max_new_tokens=2,
            timeout_s=90,
        )
        for request in range(8)
    ]
    answers = await asyncio.gather(*asked)
    assert [len(answer.usage.media) for answer in answers] == [VIDEOS] * 8


async def test_two_hundred_requests_at_once_are_answered_or_refused(client: FramesieveClient) -> None:
    """A refusal says when to retry; no request hangs."""
    clips = [media.clip(8, seed=seed) for seed in range(5)]

    async def one(number: int) -> str:
        media_of_it = Video(data=clips[number % len(clips)]) if number % 4 else None
        try:
            answer = await client.ask(
                media_of_it,
                f"Question {number}?",
                pruning_rate=(0.0, 0.5, 0.75)[number % 3],
                max_new_tokens=1 + number % 9,
                n=1 + (number % 10 == 0),
                timeout_s=120,
            )
        except errors.Overloaded as refused:
            return "refused" if refused.retry_after_s > 0 else "refused without a hint"
        assert len(answer.choices) == 1 + (number % 10 == 0)
        return "answered"

    outcomes = Counter(await asyncio.gather(*(one(number) for number in range(CROWD))))
    assert outcomes.total() == CROWD
    assert outcomes.keys() <= {"answered", "refused"}
    assert outcomes["answered"] >= PLACES / 2
    again = await client.ask(Video(data=clips[0]), "And now?", max_new_tokens=2, timeout_s=30)
    assert again.usage.completion_tokens >= 1


async def refuses_new_requests(stack: LocalStack) -> None:
    """Returns once health says that it drains and a request is refused for that reason."""
    assert await settles(lambda: is_serving(stack.address, NO_CREDENTIALS, timeout_s=30), False)
    async with grpc.aio.insecure_channel(stack.address) as channel:
        call = GenerationServiceStub(channel).Generate(GenerateRequest(), timeout=20)
        with pytest.raises(errors.Unavailable, match=r"^generation is draining$"), upstream_errors("a proxy"):
            await call.read()


async def test_an_answer_completes_while_all_services_drain(tight: LocalStack) -> None:
    """The last test of the stack."""
    async with FramesieveClient(tight.address) as client:
        deltas = 0
        last = None
        async for event in client.stream(
            Video(data=media.clip()), "What moves?", max_new_tokens=900, stop=["\x00"], timeout_s=60
        ):
            if isinstance(event, Delta):
                deltas += 1
                if deltas == 1:
                    for process in tight.processes.values():
                        process.send_signal(signal.SIGTERM)
                    await refuses_new_requests(tight)
            last = event
        assert isinstance(last, Finished)
        assert last.usage.completion_tokens >= deltas
    assert [process.wait(30) for process in tight.processes.values()] == [0, 0, 0]
