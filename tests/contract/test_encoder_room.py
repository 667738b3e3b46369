"""The encoder's output buffer: one budget for all callers, and what those who leave or wait give back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch

from common import errors
from common.checkpoint import Checkpoint
from common.plan import Grid, Modality
from demo.checkpoint import TINY
from services.encoder.families import load_tower
from services.encoder.tower import Tower
from tests.contract.encoder_peers import (
    GRID,
    SELECT_ALL,
    TIMEOUT_S,
    VIDEO,
    Media,
    Stack,
    check_served,
    embeds_in,
    encode,
    first_request,
    running,
)

ITEM_BYTES = GRID.tokens * TINY.hidden * 4


@pytest.fixture(scope="module")
def tower(tiny_checkpoint: Path) -> Tower:
    torch.set_num_threads(1)
    return load_tower(Checkpoint(tiny_checkpoint), "auto", torch.device("cpu"))


@pytest.fixture
async def stack(tmp_path: Path, tower: Tower) -> AsyncIterator[Stack]:
    async with running(tmp_path, tower) as stack:
        yield stack


async def test_an_item_that_never_fits_the_buffer_is_refused_and_smaller_ones_are_served(
    tmp_path: Path, tower: Tower
) -> None:
    async with running(tmp_path, tower, room_bytes=ITEM_BYTES) as stack:
        with pytest.raises(errors.MediaRejected, match=rf"30 tokens, {ITEM_BYTES * 5 // 4} bytes .* {ITEM_BYTES}:"):
            await encode(stack, first_request([Media(Modality.VIDEO, Grid(5, 2, 3))]), SELECT_ALL)
        await check_served(stack)


async def test_eight_requests_of_three_videos_complete_in_room_for_one_item(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=ITEM_BYTES) as stack:
        reserved: list[int] = []
        stack.preprocessing.on_select = lambda: reserved.append(stack.room.held_bytes)
        media = [[replace(VIDEO, content=3 * request + place) for place in range(3)] for request in range(8)]
        answers = await asyncio.gather(*(encode(stack, first_request(each, 0.5), SELECT_ALL) for each in media))
        assert [list(embeds_in(answer)) for answer in answers] == [[0, 1, 2]] * 8
        # Nothing was selected that had no room.
        assert reserved == [ITEM_BYTES] * 24
        assert stack.held_bytes == 0


async def test_items_are_in_flight_together_where_there_is_room(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=2 * ITEM_BYTES) as stack:
        stack.preprocessing.stall = True
        call = stack.stub.Encode(iter([first_request([VIDEO] * 3), SELECT_ALL]), timeout=TIMEOUT_S)
        assert (await call.read()).HasField("plan")
        await asyncio.wait_for(stack.preprocessing.stalled.wait(), TIMEOUT_S)
        while stack.room.held_bytes < stack.room.size_bytes:
            await asyncio.sleep(0.01)
        call.cancel()


async def test_a_caller_that_leaves_stops_the_decoder_and_frees_its_room(stack: Stack) -> None:
    stack.preprocessing.stall = True
    call = stack.stub.Encode(iter([first_request([VIDEO, VIDEO]), SELECT_ALL]), timeout=TIMEOUT_S)
    assert (await call.read()).HasField("plan")
    await asyncio.wait_for(stack.preprocessing.stalled.wait(), TIMEOUT_S)
    assert stack.room.held_bytes > 0
    call.cancel()
    await asyncio.wait_for(stack.preprocessing.cancelled.wait(), TIMEOUT_S)
    while stack.room.held_bytes:
        await asyncio.sleep(0.01)
    stack.preprocessing.stall = False
    await check_served(stack)


async def test_a_caller_that_leaves_while_it_waits_for_room_is_forgotten(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=ITEM_BYTES) as stack:
        stack.preprocessing.stall = True
        holder = stack.stub.Encode(iter([first_request([VIDEO]), SELECT_ALL]), timeout=TIMEOUT_S)
        await asyncio.wait_for(stack.preprocessing.stalled.wait(), TIMEOUT_S)
        stack.preprocessing.stall = False
        waiter = stack.stub.Encode(iter([first_request([VIDEO]), SELECT_ALL]), timeout=TIMEOUT_S)
        assert (await waiter.read()).HasField("plan")
        behind = asyncio.create_task(encode(stack, first_request([VIDEO]), SELECT_ALL))
        waiter.cancel()
        holder.cancel()
        assert list(embeds_in(await behind)) == [0]
        assert stack.held_bytes == 0


async def test_a_deadline_runs_down_the_chain(stack: Stack) -> None:
    stack.preprocessing.stall = True
    call = stack.stub.Encode(iter([first_request([VIDEO]), SELECT_ALL]), timeout=0.5)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        [_ async for _ in call]
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(stack.preprocessing.cancelled.wait(), TIMEOUT_S)
    stack.preprocessing.stall = False
    await check_served(stack)
