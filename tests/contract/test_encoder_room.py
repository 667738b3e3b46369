"""The encoder's output buffer: one budget for all callers, and what those who leave or wait give back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from prometheus_client import REGISTRY

from common import errors
from common.checkpoint import Checkpoint
from common.plan import Grid, Modality
from demo.checkpoint import TINY
from services.encoder import items
from services.encoder.families import load_tower
from services.encoder.tower import Tower
from tests.contract.encoder_peers import (
    GRID,
    SELECT_ALL,
    TIMEOUT_S,
    VIDEO,
    Media,
    Stack,
    check_idle,
    check_served,
    embeds_in,
    encode,
    first_request,
    in_use,
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
        first, second, third = (replace(VIDEO, content=content) for content in range(3))
        holder = stack.stub.Encode(iter([first_request([first]), SELECT_ALL]), timeout=TIMEOUT_S)
        await asyncio.wait_for(stack.preprocessing.stalled.wait(), TIMEOUT_S)
        stack.preprocessing.stall = False
        waiter = stack.stub.Encode(iter([first_request([second]), SELECT_ALL]), timeout=TIMEOUT_S)
        assert (await waiter.read()).HasField("plan")
        behind = asyncio.create_task(encode(stack, first_request([third]), SELECT_ALL))
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


# --- callers that leave, in every stage -------------------------------------------------------------------------


class Stop:
    """Stands in for what a thread would do, until it is let go; `reached` once it is there."""

    def __init__(self, really: Callable[..., Any]) -> None:
        self.reached, self.go = threading.Event(), threading.Event()
        self._really = really

    def __call__(self, *args: Any) -> Any:
        self.reached.set()
        assert self.go.wait(TIMEOUT_S)
        return self._really(*args)


async def leave(stack: Stack, reached: Callable[[], bool], go: Callable[[], None] = lambda: None) -> None:
    """Two callers ask for the same video, one of them for another as well; both leave once `reached`."""
    calls = [
        stack.stub.Encode(iter([first_request(media, 0.5), SELECT_ALL]), timeout=TIMEOUT_S)
        for media in ([VIDEO], [VIDEO, VIDEO])
    ]
    async with asyncio.timeout(TIMEOUT_S):
        while not reached():
            await asyncio.sleep(0.01)
    for call in calls:
        call.cancel()
    async with asyncio.timeout(TIMEOUT_S):
        while REGISTRY.get_sample_value("framesieve_requests_running", {"method": "Encode"}):
            await asyncio.sleep(0.01)
    go()
    await check_idle(stack)
    stack.preprocessing.stall = False
    await check_served(stack)


async def test_callers_leave_while_they_wait_for_room_to_send(stack: Stack) -> None:
    await stack.outputs.reserve(stack.outputs.size_bytes)
    await leave(stack, lambda: len(stack.preprocessing.prompts) == 2, lambda: stack.outputs.release(2**24))
    assert stack.preprocessing.selected == [0]  # by the next


async def test_callers_leave_while_they_wait_for_room_to_encode(stack: Stack) -> None:
    await stack.room.reserve(stack.room.size_bytes)
    await leave(stack, lambda: in_use(stack)["cache_waiters"] == 3, lambda: stack.room.release(2**24))
    assert stack.preprocessing.selected == [0]


async def test_callers_leave_while_their_media_is_decoded(stack: Stack) -> None:
    stack.preprocessing.stall = True
    await leave(stack, stack.preprocessing.stalled.is_set)
    assert stack.preprocessing.cancelled.is_set()


async def test_callers_leave_while_the_tower_runs(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop(stack.tower.encode)
    monkeypatch.setattr(stack.batcher, "_encode", stop)
    await leave(stack, lambda: stop.reached.is_set() and in_use(stack)["queued_slices"] > 0, stop.go.set)


async def test_callers_leave_while_tokens_are_chosen(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop(items.keep_tokens)
    monkeypatch.setattr(items, "keep_tokens", stop)
    await leave(stack, stop.reached.is_set, stop.go.set)


async def test_callers_leave_while_embeddings_are_sent(tmp_path: Path, tower: Tower) -> None:
    large = Media(Modality.VIDEO, Grid(64, 8, 8), content=3)
    async with running(tmp_path, tower, room_bytes=2**28) as stack:
        # More than the transport takes in between, and none of it is read.
        call = stack.stub.Encode(iter([first_request([large] * 16), SELECT_ALL]), timeout=TIMEOUT_S)
        while stack.room.held_bytes or not in_use(stack)["outputs"] or in_use(stack)["cache_waiters"]:
            await asyncio.sleep(0.01)
        call.cancel()
        await check_served(stack)
