"""What live sessions hold is bounded: those that are idle yield, and frames without room are dropped and counted."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from PIL import Image

from gridsieve.client.client import GridsieveClient
from gridsieve.common.channels import open_channel
from gridsieve.common.security.credentials import NO_CREDENTIALS
from gridsieve.v1.generation_pb2 import SNAPSHOTS_ANSWERS, LiveFrame, LiveOpen, LiveRequest, RawFrame
from gridsieve.v1.generation_pb2_grpc import GenerationServiceStub
from tests.integration.conftest import another_generation
from tests.integration.fleet import Service, Stack
from tests.integration.live import GREEDY, PICTURES, QUESTION, Watching, assert_same, video, watching

IDLE_S = 1.0
SIZE_PX = 112
FRAME_BYTES = SIZE_PX * SIZE_PX * 3
# Room for the pictures of ten frames; more than two of them are not kept to begin again with.
PICTURE_BYTES = 10 * (FRAME_BYTES + 20)
# Generation in which sessions are idle sooner.
HASTY = f"""
import runpy
from gridsieve.services.generation.live import sessions
sessions.IDLE_S = {IDLE_S}
runpy.run_module("gridsieve.services.generation", run_name="__main__", alter_sys=True)
"""
SMALL: Any = {"window_tokens": 256, "answer_tokens": 64}


@pytest.fixture(scope="module")
def hasty(stack: Stack, tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    flags = ("--kv-cache-tokens", "65536", "--live-tokens", "40960", "--media-buffer-bytes", str(PICTURE_BYTES))
    folder = tmp_path_factory.mktemp("hasty")
    with another_generation(stack, tiny_checkpoint, folder, *flags, program=HASTY) as service:
        yield service


async def show_pixels(live: Watching, first: int, end: int) -> None:
    for number in range(first, end):
        rgb = Image.open(io.BytesIO(PICTURES[number])).tobytes()
        raw = RawFrame(width=SIZE_PX, height=SIZE_PX, rgb=rgb)
        await live.send(frame=LiveFrame(time_s=number / 2, raw=raw))
        if number % 2:
            await live.until("slice")


async def test_idle_sessions_give_up_their_pictures_and_answer_as_before(hasty: Service) -> None:
    """The slice after that is taken whole, because nothing is there to compare it with."""
    async with GridsieveClient(hasty.address) as client, AsyncExitStack() as others:
        idle = await others.enter_async_context(watching(hasty.address, snapshots=SNAPSHOTS_ANSWERS, **SMALL))
        await show_pixels(idle, 0, 4)
        await asyncio.sleep(IDLE_S)
        for _ in range(4):  # each holds the last slice of two frames
            live = await others.enter_async_context(watching(hasty.address, **SMALL))
            await show_pixels(live, 0, 4)
            assert not any(each.HasField("dropped") for each in live.seen)
        await show_pixels(idle, 4, 6)
        answer = await idle.ask(QUESTION)
        assert_same(answer, await client.ask(video(0, 6, [number / 2 for number in range(6)]), QUESTION, **GREEDY))


async def test_a_resting_session_keeps_nothing_of_a_frame_without_room(hasty: Service) -> None:
    side_px, sessions = 1280, 24
    raw = RawFrame(width=side_px, height=side_px, rgb=bytes(3 * side_px**2))
    resident = []
    async with AsyncExitStack() as resting:
        for _ in range(2 * sessions):  # the first half warms up
            live = await resting.enter_async_context(watching(hasty.address, **SMALL))
            await live.send(frame=LiveFrame(raw=raw))
            await live.until("dropped")
            resident.append(hasty.metric("process_resident_memory_bytes"))
    assert resident[-1] - resident[sessions - 1] < sessions * len(raw.rgb) / 2


async def test_the_session_that_is_idle_longest_yields_to_one_that_is_opened(hasty: Service) -> None:
    half = {"window_tokens": 16384, "answer_tokens": 4096}  # of what sessions may hold
    async with watching(hasty.address, **half) as first, watching(hasty.address, **half) as second:
        with pytest.raises(grpc.aio.AioRpcError, match="live sessions have 40960 tokens"):
            async with watching(hasty.address, **half):
                pass
        await asyncio.sleep(IDLE_S)
        await first.show(PICTURES[:2], (0, 0.5))
        async with watching(hasty.address, **half) as third:
            assert (await third.ask(QUESTION))[0]
        with pytest.raises(grpc.aio.AioRpcError, match=r"was idle for \d+ s, and another one needs") as ended:
            await second.until("finished")
        assert ended.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await first.ask(QUESTION))[0]


async def test_more_than_a_thousand_idle_sessions_on_one_connection_hold_up_nobody(hasty: Service) -> None:
    least = LiveOpen(window_tokens=16, answer_tokens=16)
    async with open_channel(hasty.address, NO_CREDENTIALS) as channel, asyncio.timeout(100):
        stub, calls = GenerationServiceStub(channel), list[Any]()
        for _ in range(1100):
            calls.append(stub.Live())
            await calls[-1].write(LiveRequest(open=least))
            assert (await calls[-1].read()).HasField("accepted")
        assert (await HealthStub(channel).Check(HealthCheckRequest(), timeout=10)).status
        live = Watching(stub.Live())
        await live.send(open=LiveOpen(**SMALL))
        assert (await live.ask(QUESTION))[0]
        for call in (*calls, live.call):
            call.cancel()
