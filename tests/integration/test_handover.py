"""Three services on one host hand frames and embeddings over in shared memory; answers are those by gRPC alone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.process import free_port
from framesieve.cli.launcher import SERVICES, Endpoint, LocalStack
from framesieve.client.answer import Answer
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Image, Video
from tests import media
from tests.integration.conftest import idle, metric, running

# What messages say in place of frames and embeddings; their plans are as large either way.
ANNOUNCEMENTS_BYTES = 2048


@pytest.fixture
def apart(tiny_checkpoint: Path) -> Iterator[LocalStack]:
    """The same services, which cannot tell from the addresses that they are on one host: gRPC's for one of IPv4."""
    endpoints = {service: Endpoint(f"127.0.0.1:{free_port()}", free_port()) for service in SERVICES}
    preprocessing, encoder = (["--" + name, f"ipv4:{endpoints[name].address}"] for name in SERVICES[:2])
    flags = {"encoder": preprocessing, "generation": preprocessing + encoder}
    with running(tiny_checkpoint, endpoints=endpoints, flags=flags) as stack:
        yield stack


def sent_bytes(stack: LocalStack) -> tuple[float, float]:
    """In messages, of frames and of embeddings; plans and progress included."""
    return tuple(
        metric(stack, service, "framesieve_message_bytes_total", method=method, direction="sent")
        for service, method in (("preprocessing", "Preprocess"), ("encoder", "Encode"))
    )  # type: ignore[return-value]


async def answers(stack: LocalStack) -> tuple[list[Answer], list[float]]:
    """Answers about a pruned and a whole video and a picture, and the bytes that were sent for them."""
    before = await asyncio.to_thread(sent_bytes, stack)
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
    after = await asyncio.to_thread(sent_bytes, stack)
    return asked, [now - then for now, then in zip(after, before, strict=True)]


@pytest.mark.timeout(300)
async def test_answers_over_shared_memory_are_those_over_messages(stack: LocalStack, apart: LocalStack) -> None:
    """And nothing but announcements crosses in messages, which have all bytes of frames and embeddings without it."""
    over_memory, little = await answers(stack)
    over_messages, much = await answers(apart)
    assert [each.token_ids for each in over_memory] == [each.token_ids for each in over_messages]
    # Frames of 112 × 112 pixels at 2 a second of 8 s, and one of 168 × 168; 64 values of float32 for each token of
    # 28 × 28 pixels of two frames, half of which are kept of the first video.
    frames_bytes = 3 * (2 * 16 * 112**2 + 168**2)
    embeds_bytes = 4 * 64 * (8 * 16 // 2 + 8 * 16 + 36)
    for size_bytes, memory, messages in zip((frames_bytes, embeds_bytes), little, much, strict=True):
        assert size_bytes <= messages - memory + ANNOUNCEMENTS_BYTES
        assert messages <= 1.1 * size_bytes + memory
