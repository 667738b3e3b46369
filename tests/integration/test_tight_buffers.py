"""Buffers that hold one item, and services that are stopped while they work."""

from __future__ import annotations

import asyncio
import signal
from functools import partial
from pathlib import Path

import pytest

from client.answer import Delta, Finished
from client.client import FramesieveClient
from client.launcher import LocalStack
from client.prompt import Video
from common import errors
from demo.checkpoint import TINY
from tests import media
from tests.integration.conftest import metric, settles

VIDEOS = 3
ITEM_TOKENS = 4 * 4 * 4
EMBED_BYTES = 4


async def test_eight_requests_of_several_videos_each_do_not_deadlock(checkpoint: Path) -> None:
    item_bytes = ITEM_TOKENS * TINY.hidden * EMBED_BYTES
    flags = {
        "encoder": ["--output-buffer-bytes", str(item_bytes)],
        "generation": ["--media-buffer-bytes", str(VIDEOS * item_bytes)],
    }
    with LocalStack(checkpoint, flags=flags) as stack:
        async with FramesieveClient(stack.address) as client:
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
        for name in ("kv_blocks_used", "media_buffer_used_bytes"):
            assert await settles(partial(metric, stack, "generation", f"framesieve_generation_{name}"), 0)


async def test_media_that_never_fits_the_buffer_is_refused(checkpoint: Path) -> None:
    item_bytes = ITEM_TOKENS * TINY.hidden * EMBED_BYTES
    flags = {"generation": ["--media-buffer-bytes", str(item_bytes)]}
    with LocalStack(checkpoint, flags=flags) as stack:
        async with FramesieveClient(stack.address) as client:
            clip = Video(data=media.clip())
            with pytest.raises(errors.FramesieveError, match=str(item_bytes)):
                await client.ask([clip, clip], "What moves?", max_new_tokens=1, timeout_s=30)
            answer = await client.ask(clip, "What moves?", max_new_tokens=1, timeout_s=30)
            assert answer.usage.completion_tokens == 1


async def test_an_answer_completes_although_every_service_is_told_to_stop(checkpoint: Path) -> None:
    with LocalStack(checkpoint) as stack:
        async with FramesieveClient(stack.address) as client:
            deltas = 0
            last = None
            async for event in client.stream(
                Video(data=media.clip()), "What moves?", max_new_tokens=200, stop=["\x00"], timeout_s=60
            ):
                if isinstance(event, Delta):
                    deltas += 1
                    if deltas == 1:
                        for process in stack.processes.values():
                            process.send_signal(signal.SIGTERM)
                last = event
            assert isinstance(last, Finished)
            assert last.usage.completion_tokens >= deltas
        assert [process.wait(30) for process in stack.processes.values()] == [0, 0, 0]


async def test_a_lost_encoder_is_named_and_text_is_still_answered(checkpoint: Path) -> None:
    with LocalStack(checkpoint) as stack:
        stack.processes["encoder"].kill()
        stack.processes["encoder"].wait()
        async with FramesieveClient(stack.address) as client:
            with pytest.raises(errors.Unavailable, match="encoder"):
                await client.ask(Video(data=media.clip()), "What moves?", timeout_s=30)
            answer = await client.ask(None, "Hello?", max_new_tokens=1, timeout_s=30)
            assert answer.usage.completion_tokens == 1
