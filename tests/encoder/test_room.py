"""The encoder's output buffer: one budget for all callers, and what those who leave or wait give back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from prometheus_client import REGISTRY

from common.contract import errors
from common.contract.plan import Grid
from services.encoder.items import item as items
from services.encoder.tower.tower import Tower
from tests.common.loopback import TIMEOUT_S, eventually
from tests.encoder.encoder_peers import VIDEO, Media, video
from tests.encoder.encoder_service import (
    SELECT_ALL,
    Stack,
    check_idle,
    check_served,
    embeds_in,
    encode,
    first_request,
    in_use,
    item_bytes,
    opened,
    running,
    stalled,
)


async def test_an_item_that_never_fits_the_buffer_is_refused_and_smaller_ones_are_served(
    tmp_path: Path, tower: Tower
) -> None:
    room_bytes = item_bytes(tower)
    async with running(tmp_path, tower, room_bytes) as stack:
        with pytest.raises(
            errors.MediaRejected, match=rf"30 tokens, {room_bytes * 5 // 4} bytes .* {room_bytes} bytes, 24 tokens:"
        ):
            await encode(stack, first_request([video(1, Grid(5, 2, 3))]), SELECT_ALL)
        await check_served(stack)


def lack_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("none is left")


@pytest.mark.parametrize("where", ["room for it", "the tower", "pruning"])
async def test_a_device_without_memory_is_told_as_what_is_full_and_the_next_request_is_served(
    tmp_path: Path, tower: Tower, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    full = False

    def forward(patches: torch.Tensor, sides: Any) -> torch.Tensor:
        return lack_memory() if full else tower.forward(patches, sides)

    async with running(tmp_path, replace(tower, forward=forward)) as stack:
        with monkeypatch.context() as patched:
            full = where == "the tower"
            if where == "room for it":
                patched.setattr(torch, "empty", lack_memory)
            if where == "pruning":
                patched.setattr(items, "keep_tokens", lack_memory)
            with pytest.raises(errors.Overloaded, match="no memory left") as refused:
                await encode(stack, first_request([VIDEO], 0.5), SELECT_ALL)
        assert refused.value.retry_after_s > 0
        full = False
        await check_served(stack)


async def test_eight_requests_of_three_videos_complete_in_room_for_one_item(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=item_bytes(tower)) as stack:
        reserved: list[int] = []
        stack.preprocessing.on_select = lambda: reserved.append(stack.encoding_bytes.held_bytes)
        media = [[video(3 * request + place) for place in range(3)] for request in range(8)]
        answers = await asyncio.gather(*(encode(stack, first_request(each, 0.5), SELECT_ALL) for each in media))
        assert [list(embeds_in(answer)) for answer in answers] == [[0, 1, 2]] * 8
        # Nothing was selected that had no room.
        assert reserved == [item_bytes(tower)] * 24
        assert stack.held_bytes == 0


async def test_items_are_in_flight_together_where_there_is_room(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=2 * item_bytes(tower)) as stack:
        call = await stalled(stack, *[VIDEO] * 3)
        await eventually(lambda: stack.encoding_bytes.held_bytes == stack.encoding_bytes.size_bytes)
        call.cancel()


async def test_a_caller_that_leaves_stops_the_decoder_and_frees_its_room(stack: Stack) -> None:
    call = await stalled(stack, VIDEO, VIDEO)
    assert (await call.read()).HasField("plan")
    assert stack.encoding_bytes.held_bytes > 0
    call.cancel()
    await eventually(stack.preprocessing.cancelled.is_set)
    await eventually(lambda: not stack.encoding_bytes.held_bytes)
    await check_served(stack)


async def test_a_caller_that_leaves_while_it_waits_for_room_is_forgotten(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=item_bytes(tower)) as stack:
        holder = await stalled(stack, video(0))
        waiter = opened(stack, video(1))
        assert (await waiter.read()).HasField("plan")
        behind = asyncio.create_task(encode(stack, first_request([video(2)]), SELECT_ALL))
        waiter.cancel()
        holder.cancel()
        assert list(embeds_in(await behind)) == [0]
        assert stack.held_bytes == 0


async def test_a_deadline_runs_down_the_chain(stack: Stack) -> None:
    call = await stalled(stack, VIDEO, timeout_s=2)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        [_ async for _ in call]
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(stack.preprocessing.cancelled.is_set)
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


async def leave(
    stack: Stack, reached: Callable[[], bool], go: Callable[[], None] = lambda: None, media: Media = VIDEO
) -> None:
    """Two callers ask for the same video, one of them twice; both leave once `reached`."""
    calls = [opened(stack, media, rate=0.5), opened(stack, media, media, rate=0.5)]
    await eventually(reached)
    for call in calls:
        call.cancel()
    await eventually(lambda: not REGISTRY.get_sample_value("framesieve_requests_running", {"method": "Encode"}))
    go()
    await check_idle(stack)
    stack.preprocessing.stall = False
    await check_served(stack)


async def test_callers_leave_while_they_wait_for_room_to_send(stack: Stack) -> None:
    await stack.output_bytes.reserve(stack.output_bytes.size_bytes)
    await leave(stack, lambda: len(stack.preprocessing.prompts) == 2, lambda: stack.output_bytes.release(2**24))
    assert stack.preprocessing.selected == [0]  # by the next


async def test_callers_leave_while_they_wait_for_room_to_encode(stack: Stack) -> None:
    await stack.encoding_bytes.reserve(stack.encoding_bytes.size_bytes)
    # Two or three: whoever came first waits for room with its first item and has not begun its second.
    await leave(stack, lambda: in_use(stack)["cache_waiters"] >= 2, lambda: stack.encoding_bytes.release(2**24))
    assert stack.preprocessing.selected == [0]


async def test_callers_leave_while_their_media_is_decoded(stack: Stack) -> None:
    stack.preprocessing.stall = True
    await leave(stack, stack.preprocessing.stalled.is_set)
    assert stack.preprocessing.cancelled.is_set()


async def test_callers_leave_while_the_tower_runs(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop(stack.tower.encode)
    monkeypatch.setattr(stack.batcher, "_encode", stop)
    more_than_a_forward = video(1, Grid(16, 2, 3))
    reached = lambda: stop.reached.is_set() and in_use(stack)["queue_slices"] > 0  # noqa: E731
    await leave(stack, reached, stop.go.set, more_than_a_forward)


async def test_callers_leave_while_tokens_are_chosen(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop(items.keep_tokens)
    monkeypatch.setattr(items, "keep_tokens", stop)
    await leave(stack, stop.reached.is_set, stop.go.set)


async def test_callers_leave_while_embeddings_are_sent(tmp_path: Path, tower: Tower) -> None:
    large = video(3, Grid(64, 8, 8))
    async with running(tmp_path, tower, room_bytes=2**28) as stack:
        # More than the transport takes in between, and none of it is read.
        call = opened(stack, *[large] * 16)
        while stack.encoding_bytes.held_bytes or not in_use(stack)["outputs"] or in_use(stack)["cache_waiters"]:
            await asyncio.sleep(0.01)
        call.cancel()
        await check_served(stack)
