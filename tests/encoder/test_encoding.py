"""Unpruned embeddings being made: room first, little ahead of the tower, nothing held once closed."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import Tensor

from common.byte_semaphore import ByteSemaphore
from services.encoder.items.batcher import Batcher
from services.encoder.items.encoding import Encoding
from tests.encoder.gated_tower import SIZE_BYTES, TIMEOUT_S, TOWER, VIDEO, GatedTower, encode_all, slice_of

pytest_plugins = ["tests.encoder.gated_tower_fixtures"]


def encoding_in(room: ByteSemaphore, batcher: Batcher) -> Encoding:
    return Encoding(VIDEO, TOWER, batcher, room)


async def test_room_for_all_of_it_is_held_until_it_is_closed(batcher: Batcher) -> None:
    room = ByteSemaphore(SIZE_BYTES + 10)
    encoding = encoding_in(room, batcher)
    await encoding.reserve()
    await encoding.reserve()
    assert room.held_bytes == SIZE_BYTES
    encoding.close()
    encoding.close()
    assert room.held_bytes == 0


async def test_a_slow_tower_holds_the_decoder_back(batcher: Batcher, gated: GatedTower) -> None:
    encoding = encoding_in(ByteSemaphore(SIZE_BYTES), batcher)
    await encoding.reserve()
    for index in (0, 1):
        await encoding.add(slice_of(1 + index, index))
    third = asyncio.create_task(encoding.add(slice_of(3, 2)))
    await asyncio.sleep(0.05)
    assert not third.done()
    gated.gate.release()
    await asyncio.wait_for(third, TIMEOUT_S)
    encoding.close()


async def test_what_waits_for_a_slow_tower_gives_up_once_it_is_closed(batcher: Batcher, gated: GatedTower) -> None:
    encoding = encoding_in(ByteSemaphore(SIZE_BYTES), batcher)
    await encoding.reserve()
    for index in (0, 1):
        await encoding.add(slice_of(1 + index, index))
    assert await asyncio.to_thread(gated.started.acquire, timeout=TIMEOUT_S)
    third = asyncio.create_task(encoding.add(slice_of(3, 2)))
    await asyncio.sleep(0)
    encoding.close()
    await asyncio.wait_for(third, TIMEOUT_S)
    gated.gate.release()
    await asyncio.to_thread(batcher.close)
    assert gated.encoded == [1]  # which was running already


async def test_a_stream_that_begins_anew_is_passed_over_up_to_what_is_there(
    batcher: Batcher, gated: GatedTower
) -> None:
    encoding = encoding_in(ByteSemaphore(SIZE_BYTES), batcher)
    await encoding.reserve()
    for index in (0, 1):
        await encoding.add(slice_of(1 + index, index, repaired_frames=1))
    counts = (encoding.decoded_slices, encoding.repaired_frames)
    assert counts == (2, 2)
    for _ in range(6):
        gated.gate.release()
    for index in range(6):
        await encoding.add(slice_of(11 + index, index, repaired_frames=1))
    while not encoding.complete:
        await asyncio.wait_for(encoding.changed(), TIMEOUT_S)
    assert gated.encoded == [1, 2, 13, 14, 15, 16]
    assert encoding.repaired_frames == 6
    encoding.close()


async def test_a_closed_items_slices_leave_the_queue(batcher: Batcher, gated: GatedTower) -> None:
    room = ByteSemaphore(2 * SIZE_BYTES)
    first, second = encoding_in(room, batcher), encoding_in(room, batcher)
    await first.reserve()
    await second.reserve()
    for index in (0, 1):
        await first.add(slice_of(1 + index, index))
    await second.add(slice_of(7, 0))
    assert await asyncio.to_thread(gated.started.acquire, timeout=TIMEOUT_S)
    first.close()
    await asyncio.sleep(0)
    for _ in range(3):
        gated.gate.release()
    await asyncio.wait_for(second.changed(), TIMEOUT_S)
    assert second.encoded_slices == 1
    assert gated.encoded == [1, 7]  # 1 was running already
    second.close()


async def test_a_failing_tower_fails_the_item(batcher: Batcher, gated: GatedTower) -> None:
    encoding = encoding_in(ByteSemaphore(SIZE_BYTES), batcher)
    await encoding.reserve()
    await encode_all(encoding, gated, [1, 99])
    assert isinstance(encoding.failure, RuntimeError)
    assert not encoding.complete
    encoding.close()


async def test_room_for_a_buffer_that_cannot_be_had_is_given_back(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = ByteSemaphore(SIZE_BYTES)
    encoding = encoding_in(room, batcher)

    def out_of_memory(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("none is left")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            await encoding.reserve()
    assert room.held_bytes == 0
    await asyncio.wait_for(encoding.reserve(), TIMEOUT_S)  # by another who waits for it
    assert room.held_bytes == SIZE_BYTES
    encoding.close()
    assert room.held_bytes == 0
