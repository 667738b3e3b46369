"""Three services on one host hand frames and embeddings over in shared memory; answers are those by gRPC alone."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from framesieve.cli.launcher import SERVICES, Endpoint, LocalStack
from framesieve.client.answer import Answer
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Image, Video
from framesieve.common.process import free_port
from tests import media
from tests.integration.conftest import idle, metric, running


@pytest.fixture
def apart(tiny_checkpoint: Path) -> Iterator[LocalStack]:
    """The same services, which cannot tell from the addresses that they are on one host: gRPC's for one of IPv4."""
    endpoints = {service: Endpoint(f"127.0.0.1:{free_port()}", free_port()) for service in SERVICES}
    preprocessing, encoder = (["--" + name, f"ipv4:{endpoints[name].address}"] for name in SERVICES[:2])
    flags = {"encoder": preprocessing, "generation": preprocessing + encoder}
    with running(tiny_checkpoint, endpoints=endpoints, flags=flags) as stack:
        yield stack


def moved_bytes(stack: LocalStack) -> tuple[float, float, int, int]:
    """Frames and embeddings, with plans and progress, and how much of each was handed over, by the log."""
    sent = (
        metric(stack, service, "framesieve_message_bytes_total", method=method, direction="sent")
        for service, method in (("preprocessing", "Preprocess"), ("encoder", "Encode"))
    )
    logs = (stack.log(service) for service in SERVICES[:2])
    handed_over = (sum(map(int, re.findall(r'"handed_over_bytes": (\d+)', log))) for log in logs)
    return *sent, *handed_over  # type: ignore[return-value]


async def answers(stack: LocalStack) -> tuple[list[Answer], list[float]]:
    """Answers about a pruned and a whole video and a picture, and the bytes that were moved for them."""
    before = await asyncio.to_thread(moved_bytes, stack)
    async with FramesieveClient(stack.address) as client:
        asked = [
            await client.ask(content, "What moves?", pruning_rate=rate, max_new_tokens=12, temperature=0)
            for content, rate in (
                (Video(data=media.clip(32, seed=900)), 0.5),
                (Video(data=media.clip(32, seed=901)), 0.0),
                (Image(data=media.picture(168, 168)), 0.0),
            )
        ]
    await idle(stack)
    after = await asyncio.to_thread(moved_bytes, stack)
    return asked, [now - then for now, then in zip(after, before, strict=True)]


@pytest.mark.timeout(300)
async def test_answers_over_shared_memory_are_those_over_messages(stack: LocalStack, apart: LocalStack) -> None:
    """And all frames and embeddings are handed over where they can be, and none where not."""
    over_memory, (*crossed, frames, embeds) = await answers(stack)
    over_messages, (*sent, none, nothing) = await answers(apart)
    assert [each.token_ids for each in over_memory] == [each.token_ids for each in over_messages]
    # Frames of 112 × 112 pixels at 2 a second of 8 s, and one of 168 × 168; 64 values of float32 for each token of
    # 28 × 28 pixels of two frames, half of which are kept of the first video.
    assert frames == 3 * (2 * 16 * 112**2 + 168**2)
    assert embeds == 4 * 64 * (8 * 16 // 2 + 8 * 16 + 36)
    assert none == nothing == 0
    assert crossed == pytest.approx(sent, rel=0.05)
