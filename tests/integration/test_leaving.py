"""Clients that vanish, in each stage: within a second nobody works for them, and all that they held is free."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import pytest

from client.client import FramesieveClient
from client.prompt import Video
from common.errors import DeadlinePassed
from tests.integration.fleet import Fleet, at_rest, until
from tests.integration.load import SOON_S, Asked, asked_about, endless, long_clip, long_text, short_clip
from tests.integration.test_workers import children
from tests.unit.loopback import head, serving


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[FramesieveClient]:
    async with FramesieveClient(fleet.generation.address) as connected:
        yield connected


@asynccontextmanager
async def leaving(fleet: Fleet, *asked: Asked) -> AsyncIterator[None]:
    """Has them leave at the end, none of them having ended by itself."""
    yield
    for each in asked:
        assert not each.task.done()
        await each.leave()
    await at_rest(fleet.first, within_s=SOON_S)


@pytest.fixture
def stopped_workers(fleet: Fleet) -> Iterator[None]:
    """The processes that read and decode stand still."""
    workers = children(fleet.preprocessing[0].pid)
    for each in workers:
        os.kill(each, signal.SIGSTOP)
    yield
    for each in workers:
        with suppress(ProcessLookupError):  # those that did not stop when told to were replaced
            os.kill(each, signal.SIGCONT)


async def test_while_media_is_fetched(fleet: Fleet, client: FramesieveClient, fetch_port: int) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        writer.write(head(200, "Content-Length: 1000000"))
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.02)

    async with serving(drip, port=fetch_port) as server:
        asked = asked_about(client, Video(url=f"http://localhost:{fetch_port}/clip.mp4"))
        async with leaving(fleet, asked):
            await until(lambda: server.requests)
        await until(lambda: all(task.done() for task in server.serving), within_s=SOON_S)


@pytest.mark.usefixtures("stopped_workers")
async def test_while_media_is_read(fleet: Fleet, client: FramesieveClient) -> None:
    asked = asked_about(client, short_clip(1000))
    jobs = partial(fleet.preprocessing[0].metric, "framesieve_preprocessing_jobs", pool="read")
    async with leaving(fleet, asked):
        await until(lambda: jobs() == 1)


async def test_while_media_is_decoded_and_another_waits_for_the_encoder(fleet: Fleet, client: FramesieveClient) -> None:
    one, other = long_clip(1001), long_clip(1002)
    encoding = asked_about(client, one)
    await until(lambda: encoding.half_encoded)
    waiting = asked_about(client, other)
    async with leaving(fleet, waiting, encoding):
        await until(lambda: fleet.encoder[0].metric("framesieve_encoder_room_waiting") >= 1)
        assert fleet.preprocessing[0].metric("framesieve_preprocessing_jobs", pool="decode") == 1


async def test_while_the_last_slices_are_encoded(fleet: Fleet, client: FramesieveClient) -> None:
    asked = asked_about(client, long_clip(1003))
    encoder, preprocessing = fleet.encoder[0], fleet.preprocessing[0]
    async with leaving(fleet, asked):
        await until(lambda: encoder.metric("framesieve_encoder_queue_slices"))
        await until(lambda: not preprocessing.in_use())
        await until(lambda: encoder.metric("framesieve_encoder_queue_slices"))


async def test_while_a_prompt_is_prefilled(fleet: Fleet, client: FramesieveClient) -> None:
    running = partial(fleet.generation.metric, "framesieve_generation_engine_requests", state="running")
    asked = Asked(client.stream(None, long_text(1004), max_new_tokens=4))
    async with leaving(fleet, asked):
        await until(lambda: running() == 1)
        assert not asked.tokens


async def test_while_tokens_come_and_others_wait_to_run(fleet: Fleet, client: FramesieveClient) -> None:
    asked = [endless(client) for _ in range(5)]
    waiting = partial(fleet.generation.metric, "framesieve_generation_engine_requests", state="waiting")
    async with leaving(fleet, *asked):
        await until(lambda: sum(each.tokens > 0 for each in asked) == 4)
        assert waiting() == 1


@pytest.mark.parametrize("timeout_s", [0.3, 1.2])
async def test_a_deadline_that_passes_is_as_good_as_leaving(
    fleet: Fleet, client: FramesieveClient, timeout_s: float
) -> None:
    asked = Asked(client.stream(long_clip(1005), "What moves?", timeout_s=timeout_s))
    await asyncio.wait_for(asked.task, timeout_s + SOON_S)
    assert isinstance(asked.failed, DeadlinePassed)
    await at_rest(fleet.first, within_s=SOON_S)
