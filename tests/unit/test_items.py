"""A selected item: room before anything else, only so much ahead of the tower, and nothing held once it is closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from common.errors import MediaRejected
from common.plan import Grid, MediaPlan, Modality, Run
from common.retention import Pruning
from common.room import Room
from common.tensors import DType, TensorBuffer
from services.encoder.batcher import Batcher
from services.encoder.items import Item
from services.encoder.patches import PatchShape
from services.encoder.tower import Tower

GRID = Grid(6, 2, 2)
LEVELS, WIDTH = 2, 8
SIZE_BYTES = LEVELS * GRID.tokens * WIDTH * 4
TIMEOUT_S = 10


class GatedTower:
    """Encodes a slice of value v as rows of v (and 100 + v on level 1), one forward each time the gate is opened."""

    def __init__(self) -> None:
        self.started = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.encoded: list[int] = []

    def encode(self, slices: Sequence[Tensor]) -> list[Tensor]:
        self.started.release()
        assert self.gate.acquire(timeout=TIMEOUT_S)
        self.encoded += [int(frames[0, 0, 0, 0]) for frames in slices]
        if 99 in self.encoded:
            raise RuntimeError("the tower fell")
        levels = torch.tensor([0.0, 100.0])[:, None, None]
        ramp = torch.linspace(0, 1, WIDTH)
        return [(float(frames[0, 0, 0, 0]) * ramp + levels).expand(-1, GRID.slice_tokens, -1) for frames in slices]


TOWER = Tower(
    forward=lambda patches, grids: patches,
    patches=PatchShape(patch_px=1, merge=1, temporal_patch=1),
    embed_dim=WIDTH,
    embed_levels=LEVELS - 1,
    dtype=torch.float32,
    device=torch.device("cpu"),
)
VIDEO = MediaPlan(
    modality=Modality.VIDEO,
    grid=GRID,
    runs=(Run(0, GRID.tokens),),
    frames=6,
    frame_height_px=2,
    frame_width_px=2,
    seconds_per_grid=Fraction(1),
    timestamps_s=(),
    content_hash=bytes(32),
)


@pytest.fixture
def gated() -> GatedTower:
    return GatedTower()


@pytest.fixture
def make_item(gated: GatedTower) -> Iterator[Callable[[float], Item]]:
    """Items whose batcher takes one slice a forward."""
    batcher = Batcher(gated.encode, budget_tokens=GRID.slice_tokens)
    yield lambda rate: Item(0, VIDEO, Pruning(rate), TOWER, batcher)
    for _ in range(100):
        gated.gate.release()
    batcher.close()


def slice_of(value: int) -> TensorBuffer:
    buffer = TensorBuffer(DType.UINT8, (1, 2, 2, 3))
    buffer.add(DType.UINT8, (1, 2, 2, 3), 0, bytes([value] * 12))
    return buffer


async def encode_all(item: Item, gated: GatedTower, values: Sequence[int]) -> None:
    for _ in values:
        gated.gate.release()
    for value in values:
        await item.add(slice_of(value), repaired_frames=0)
    while not await item.next_encoded():
        pass


async def test_embeddings_of_all_levels_are_pruned_by_one_mask(
    make_item: Callable[[float], Item], gated: GatedTower
) -> None:
    item = make_item(0.5)
    await item.reserve(Room(SIZE_BYTES))
    # Multiples of one vector: every token ties, so that the earliest half is kept.
    await encode_all(item, gated, [1, 2, 3, 4, 5, 6])
    embeds = await item.finish()
    item.close()
    assert embeds.kept is not None
    assert embeds.kept.tolist() == list(range(12))
    assert (embeds.dtype, embeds.shape) == (DType.FLOAT32, (LEVELS, 12, WIDTH))
    rows = np.frombuffer(embeds.data, np.float32).reshape(embeds.shape)
    assert rows[0, :, -1].tolist() == [1] * 4 + [2] * 4 + [3] * 4
    assert rows[1, :, 0].tolist() == [100] * 12


async def test_at_rate_0_everything_is_kept_and_nothing_is_listed(
    make_item: Callable[[float], Item], gated: GatedTower
) -> None:
    item = make_item(0)
    await item.reserve(Room(SIZE_BYTES))
    await encode_all(item, gated, [1, 2, 3, 4, 5, 6])
    embeds = await item.finish()
    assert embeds.kept is None
    assert embeds.data.nbytes == SIZE_BYTES
    item.close()


async def test_an_item_that_is_filled_is_pruned_like_one_that_was_encoded(make_item: Callable[[float], Item]) -> None:
    item = make_item(0.5)
    await item.reserve(Room(SIZE_BYTES))
    rows = torch.arange(1.0, 1 + GRID.tokens)[:, None] * torch.linspace(0, 1, WIDTH)
    await item.fill(torch.stack([rows, 100 + rows]).bfloat16())
    assert await item.next_encoded()
    assert (item.decoded_slices, item.encoded_slices, item.repaired_frames) == (6, 6, 0)
    embeds = await item.finish()
    item.close()
    assert embeds.kept is not None
    # Of multiples of one vector, slice 0 and then those that bfloat16 turned the most; all levels by the same mask.
    assert embeds.kept.size == 12
    sent = np.frombuffer(embeds.data, np.float32).reshape(embeds.shape)
    expected = torch.stack([rows, 100 + rows]).bfloat16().float()[:, embeds.kept.tolist()]
    assert (embeds.dtype, sent.tolist()) == (DType.FLOAT32, expected.tolist())


async def test_room_for_the_unpruned_item_is_held_until_it_is_closed(make_item: Callable[[float], Item]) -> None:
    room, item = Room(SIZE_BYTES + 10), make_item(0.75)
    await item.reserve(room)
    assert room.held_bytes == SIZE_BYTES
    item.close()
    item.close()
    assert room.held_bytes == 0


async def test_an_item_larger_than_all_the_room_is_refused_at_once(make_item: Callable[[float], Item]) -> None:
    room, item = Room(SIZE_BYTES - 1), make_item(0.75)
    with pytest.raises(MediaRejected, match=f"24 tokens, {SIZE_BYTES} bytes .* room for {SIZE_BYTES - 1}: lower fps"):
        await item.reserve(room)
    item.close()
    assert room.held_bytes == 0


async def test_a_slow_tower_holds_the_decoder_back(make_item: Callable[[float], Item], gated: GatedTower) -> None:
    item = make_item(0)
    await item.reserve(Room(SIZE_BYTES))
    for value in (1, 2):
        await item.add(slice_of(value), 0)
    third = asyncio.create_task(item.add(slice_of(3), 0))
    await asyncio.sleep(0.05)
    assert not third.done()
    gated.gate.release()
    await asyncio.wait_for(third, TIMEOUT_S)
    item.close()


async def test_a_closed_items_slices_leave_the_queue(make_item: Callable[[float], Item], gated: GatedTower) -> None:
    first, second = make_item(0), make_item(0)
    room = Room(2 * SIZE_BYTES)
    await first.reserve(room)
    await second.reserve(room)
    for value in (1, 2):
        await first.add(slice_of(value), 0)
    await second.add(slice_of(7), 0)
    assert await asyncio.to_thread(gated.started.acquire, timeout=TIMEOUT_S)
    first.close()
    await asyncio.sleep(0)
    for _ in range(3):
        gated.gate.release()
    assert not await second.next_encoded()
    assert gated.encoded == [1, 7]  # 1 was running already
    second.close()


async def test_a_failing_tower_fails_the_item(make_item: Callable[[float], Item], gated: GatedTower) -> None:
    item = make_item(0)
    await item.reserve(Room(SIZE_BYTES))
    with pytest.raises(RuntimeError, match="the tower fell"):
        await encode_all(item, gated, [1, 99])
    item.close()
