"""Byte limits of the encoder, memory of its device, and callers that disconnect at any stage."""

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
from common.contract.plan import Grid, Modality
from services.encoder.items import item as items
from services.encoder.tower.tower import Tower
from tests.common.loopback import TIMEOUT_S, eventually
from tests.encoder.encoder_peers import VIDEO, Media, brought, video
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


@pytest.mark.parametrize(
    ("modality", "grid", "remedy"),
    [
        (Modality.VIDEO, Grid(5, 2, 3), "lower fps or max_frames (now 10 frames), or max_pixels (now {0}×{1} a frame)"),
        (Modality.IMAGE, Grid(1, 5, 6), "lower max_pixels (now {0}×{1} a frame)"),
        (None, Grid(5, 2, 3), "bring fewer than the 5×2×3 of embeds.grid"),
    ],
)
async def test_an_item_that_can_never_fit_is_refused_with_the_limit_and_a_remedy(
    tmp_path: Path, tower: Tower, modality: Modality | None, grid: Grid, remedy: str
) -> None:
    room_bytes, shape = item_bytes(tower), (1 + tower.embed_levels, grid.tokens, tower.embed_dim)
    media = Media(modality, grid) if modality else brought(torch.zeros(shape), grid)
    remedy = remedy.format(grid.h * tower.patches.token_px, grid.w * tower.patches.token_px)
    async with running(tmp_path, tower, room_bytes) as stack:
        with pytest.raises(errors.MediaRejected) as refused:
            await encode(stack, first_request([media], 0.75), SELECT_ALL)
        assert str(refused.value) == (
            f"media 0 becomes 30 tokens, {room_bytes * 5 // 4} bytes of embeddings; the encoder has room for "
            f"{room_bytes} bytes, 24 tokens: {remedy}"
        )
        await check_served(stack)


def lack_memory(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("none is left")


@pytest.mark.parametrize("where", ["allocation", "tower", "pruning"])
async def test_device_out_of_memory_is_answered_with_overloaded(
    tmp_path: Path, tower: Tower, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    full = False

    def forward(patches: torch.Tensor, sides: Any) -> torch.Tensor:
        return lack_memory() if full else tower.forward(patches, sides)

    async with running(tmp_path, replace(tower, forward=forward)) as stack:
        with monkeypatch.context() as patched:
            full = where == "tower"
            if where == "allocation":
                patched.setattr(torch, "empty", lack_memory)
            if where == "pruning":
                patched.setattr(items, "keep_tokens", lack_memory)
            with pytest.raises(errors.Overloaded, match="no memory left") as refused:
                await encode(stack, first_request([VIDEO], 0.5), SELECT_ALL)
        assert refused.value.retry_after_s > 0
        full = False
        await check_served(stack)


async def test_eight_requests_of_three_videos_complete_with_bytes_for_one_item(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=item_bytes(tower)) as stack:
        reserved: list[int] = []
        stack.preprocessing.on_select = lambda: reserved.append(stack.encoding_bytes.held_bytes)
        media = [[video(3 * request + place) for place in range(3)] for request in range(8)]
        answers = await asyncio.gather(*(encode(stack, first_request(each, 0.5), SELECT_ALL) for each in media))
        assert [list(embeds_in(answer)) for answer in answers] == [[0, 1, 2]] * 8
        # Each item had its bytes before it was selected.
        assert reserved == [item_bytes(tower)] * 24
        assert stack.held_bytes == 0


async def test_items_are_encoded_concurrently_if_their_bytes_fit(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=2 * item_bytes(tower)) as stack:
        call = await stalled(stack, *[VIDEO] * 3)
        await eventually(lambda: stack.encoding_bytes.held_bytes == stack.encoding_bytes.size_bytes)
        call.cancel()


async def test_a_caller_that_leaves_while_waiting_for_bytes_lets_others_pass(tmp_path: Path, tower: Tower) -> None:
    async with running(tmp_path, tower, room_bytes=item_bytes(tower)) as stack:
        holder = await stalled(stack, video(0))
        waiter = opened(stack, video(1))
        assert (await waiter.read()).HasField("plan")
        behind = asyncio.create_task(encode(stack, first_request([video(2)]), SELECT_ALL))
        waiter.cancel()
        holder.cancel()
        assert list(embeds_in(await behind)) == [0]
        assert stack.held_bytes == 0


async def test_a_deadline_cancels_the_call_of_preprocessing(stack: Stack) -> None:
    call = await stalled(stack, VIDEO, timeout_s=0.5)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        [_ async for _ in call]
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(stack.preprocessing.cancelled.is_set)
    await check_served(stack)


# --- callers that disconnect at any stage -----------------------------------------------------------------------


class Stop:
    """A function that sets `reached` and waits for `go` before it does its work."""

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
    """Two callers request the same video, one of them twice; both disconnect once `reached`."""
    calls = [opened(stack, media, rate=0.5), opened(stack, media, media, rate=0.5)]
    await eventually(reached)
    for call in calls:
        call.cancel()
    await eventually(lambda: not REGISTRY.get_sample_value("framesieve_requests_running", {"method": "Encode"}))
    go()
    await check_idle(stack)
    stack.preprocessing.stall = False
    await check_served(stack)


async def test_callers_leave_while_waiting_for_output_bytes(stack: Stack) -> None:
    await stack.output_bytes.reserve(stack.output_bytes.size_bytes)
    await leave(stack, lambda: len(stack.preprocessing.prompts) == 2, lambda: stack.output_bytes.release(2**24))
    assert stack.preprocessing.selected == [0]  # by check_served


async def test_callers_leave_while_waiting_for_encoding_bytes(stack: Stack) -> None:
    await stack.encoding_bytes.reserve(stack.encoding_bytes.size_bytes)
    # Two or three: the first caller waits for bytes with its first item, and may not have started its second.
    await leave(stack, lambda: in_use(stack)["cache_waiters"] >= 2, lambda: stack.encoding_bytes.release(2**24))
    assert stack.preprocessing.selected == [0]


async def test_callers_leave_while_media_is_decoded(stack: Stack) -> None:
    stack.preprocessing.stall = True
    await leave(stack, stack.preprocessing.stalled.is_set)
    assert stack.preprocessing.cancelled.is_set()


async def test_callers_leave_while_the_tower_runs(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop(stack.tower.encode)
    monkeypatch.setattr(stack.batcher, "_encode", stop)
    more_than_a_forward = video(1, Grid(16, 2, 3))
    reached = lambda: stop.reached.is_set() and in_use(stack)["queue_slices"] > 0  # noqa: E731
    await leave(stack, reached, stop.go.set, more_than_a_forward)


async def test_callers_leave_while_tokens_are_pruned(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = Stop(items.keep_tokens)
    monkeypatch.setattr(items, "keep_tokens", stop)
    await leave(stack, stop.reached.is_set, stop.go.set)


async def test_callers_leave_while_embeddings_are_sent(tmp_path: Path, tower: Tower) -> None:
    large = video(3, Grid(64, 8, 8))
    async with running(tmp_path, tower, room_bytes=2**28) as stack:
        # More than gRPC buffers, and none of it is read.
        call = opened(stack, *[large] * 16)
        while stack.encoding_bytes.held_bytes or not in_use(stack)["outputs"] or in_use(stack)["cache_waiters"]:
            await asyncio.sleep(0.01)
        call.cancel()
        await check_served(stack)
