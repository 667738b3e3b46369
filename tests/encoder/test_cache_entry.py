"""Cache entries while they are made: few slices are queued ahead of the tower, and closing frees everything."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from common.byte_semaphore import ByteSemaphore
from common.contract.plan import Grid
from common.contract.tensors import DType, TensorBuffer
from services.encoder.items.batcher import Batcher
from services.encoder.items.cache_entry import CacheEntry, FrameSlice
from tests.encoder.gated_tower import TIMEOUT_S, GatedTower
from tests.encoder.test_cache import TOWER, retyped

PLAN = retyped(Grid(6, 2, 2))
TOKENS = 4  # of a slice
NARROW = replace(TOWER, embed_dim=2)
SIZE_BYTES = 2 * PLAN.grid.tokens * 2 * 4


@pytest.fixture
def tower() -> GatedTower:
    return GatedTower()


@pytest.fixture
def batcher(tower: GatedTower) -> Iterator[Batcher]:
    """One slice per forward."""
    batcher = Batcher(tower.encode, budget_tokens=TOKENS)
    yield batcher
    tower.open()
    batcher.close()


def entry_in(semaphore: ByteSemaphore, batcher: Batcher) -> CacheEntry:
    return CacheEntry(None, PLAN, NARROW, batcher, semaphore)


def slice_of(name: int, index: int) -> FrameSlice:
    buffer = TensorBuffer(DType.UINT8, (1, 2, 2, 3))
    buffer.add(DType.UINT8, (1, 2, 2, 3), 0, bytes([name, TOKENS] * 6))
    return FrameSlice(0, index, buffer, repaired_frames=1, decoded_ns=0, resized_ns=0)


async def test_a_slow_tower_holds_the_decoder_back_until_the_entry_is_closed(
    batcher: Batcher, tower: GatedTower
) -> None:
    semaphore = ByteSemaphore(2 * SIZE_BYTES)
    entry, other = entry_in(semaphore, batcher), entry_in(semaphore, batcher)
    await entry.reserve()
    await other.reserve()
    for index in (0, 1):
        await entry.add_slice(slice_of(1 + index, index))
    assert await asyncio.to_thread(tower.started.acquire, timeout=TIMEOUT_S)
    third = asyncio.create_task(entry.add_slice(slice_of(3, 2)))
    await asyncio.sleep(0.05)
    assert not third.done()
    tower.open(1)
    await asyncio.wait_for(third, TIMEOUT_S)
    fourth = asyncio.create_task(entry.add_slice(slice_of(4, 3)))
    await asyncio.sleep(0)
    await other.add_slice(slice_of(7, 0))
    entry.close()
    entry.close()
    await asyncio.wait_for(fourth, TIMEOUT_S)
    assert semaphore.held_bytes == SIZE_BYTES
    tower.open()
    while not other.encoded_slices:
        await asyncio.wait_for(other.changed(), TIMEOUT_S)
    assert tower.forwards == [[1], [2], [7]]  # 2 was running; 3 has left the queue
    other.close()


async def test_a_stream_that_takes_over_adds_only_the_missing_slices(batcher: Batcher, tower: GatedTower) -> None:
    entry = entry_in(ByteSemaphore(SIZE_BYTES), batcher)
    await entry.reserve()
    for index in (0, 1):
        await entry.add_slice(slice_of(1 + index, index))
    assert (entry.decoded_slices, entry.repaired_frames) == (2, 2)
    tower.open()
    for index in range(6):
        await entry.add_slice(slice_of(21 + index, index))
    while not entry.complete:
        await asyncio.wait_for(entry.changed(), TIMEOUT_S)
    assert tower.forwards == [[1], [2], [23], [24], [25], [26]]
    assert entry.repaired_frames == 6
    entry.close()


async def test_bytes_are_released_if_the_buffer_cannot_be_allocated(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    semaphore = ByteSemaphore(SIZE_BYTES)
    entry = entry_in(semaphore, batcher)

    def out_of_memory(*_: object, **__: object) -> Tensor:
        raise torch.OutOfMemoryError("none is left")

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", out_of_memory)
        with pytest.raises(torch.OutOfMemoryError):
            await entry.reserve()
    assert semaphore.held_bytes == 0
    for _ in range(2):  # by the next leader, and at once if the entry has its bytes
        await asyncio.wait_for(entry.reserve(), TIMEOUT_S)
        assert semaphore.held_bytes == SIZE_BYTES
    entry.close()
    assert semaphore.held_bytes == 0
