"""Services with room for one item and few requests: no deadlock, and overload is refused."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path

import pytest

from demo.checkpoint import TINY
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Options, Video
from gridsieve.common.contract import errors
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
