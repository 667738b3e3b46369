"""One request's item: pruned by one mask, refused where it can never fit, told of a tower that ended; no room is left.

How its embeddings are made is `test_encoding.py`'s.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.byte_semaphore import ByteSemaphore
from common.contract.errors import MediaRejected, Unavailable
from common.contract.plan import Grid, MediaPlan, Modality
from common.contract.retention import Pruning
from common.contract.tensors import DType
from services.encoder.items import item as items
from services.encoder.items.batcher import Batcher
from services.encoder.items.cache import EmbedsCache, Entry
from services.encoder.items.item import Embeds, Item
from services.encoder.pruning.methods import keep_tokens
from services.encoder.tower.readback import Readback
from tests.encoder.gated_tower import (
    GRID,
    LEVELS,
    SIZE_BYTES,
    TIMEOUT_S,
    TOWER,
    VIDEO,
    WIDTH,
    GatedTower,
    encode_all,
    slice_of,
)

pytest_plugins = ["tests.encoder.gated_tower_fixtures"]


class OneStream:
    """Decodes what is selected at once: slices of the values 1 to 6."""

    def __init__(self, gated: GatedTower) -> None:
        self._gated = gated

    async def select(self, media_index: int, entry: Entry) -> None:
        await encode_all(entry.encoding, self._gated, [1, 2, 3, 4, 5, 6])

    def brings(self, entry: Entry) -> bool:
        return False

    def end_if_unwanted(self) -> None:
        pass


async def obtained(rate: float, gated: GatedTower, batcher: Batcher, brought: Tensor | None = None) -> Embeds:
    room, outputs = ByteSemaphore(SIZE_BYTES), ByteSemaphore(SIZE_BYTES)
    item = Item(0, VIDEO, Pruning(rate), EmbedsCache(TOWER, batcher, room, 0), outputs)
    await item.start(OneStream(gated), brought)
    await item.obtain(OneStream(gated), lambda _: None)
    embeds = item.embeds
    assert (room.held_bytes, outputs.held_bytes) == (0, embeds.data.nbytes)
    item.close()
    item.close()
    assert outputs.held_bytes == 0
    return embeds


async def test_embeddings_of_all_levels_are_pruned_by_one_mask(gated: GatedTower, batcher: Batcher) -> None:
    # Multiples of one vector: every token ties, so that the earliest half is kept.
    embeds = await obtained(0.5, gated, batcher)
    assert embeds.kept is not None
    assert embeds.kept.tolist() == list(range(12))
    assert (embeds.dtype, embeds.shape) == (DType.FLOAT32, (LEVELS, 12, WIDTH))
    rows = np.frombuffer(embeds.data, np.float32).reshape(embeds.shape)
    assert rows[0, :, -1].tolist() == [1] * 4 + [2] * 4 + [3] * 4
    assert rows[1, :, 0].tolist() == [100] * 12


async def test_kept_rows_and_their_indices_are_all_that_leaves_the_device(
    gated: GatedTower, batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[int]] = []

    class Recording(Readback):
        def __init__(self, *tensors: Tensor) -> None:
            read.extend(list(each.shape) for each in tensors)
            super().__init__(*tensors)

    monkeypatch.setattr(items, "Readback", Recording)
    embeds = await obtained(0.75, gated, batcher)
    assert read == [[LEVELS, 6, WIDTH], [6]]
    assert embeds.shape == (LEVELS, 6, WIDTH)


async def test_on_the_device_of_the_embeddings_they_are_pruned_and_brought_to_the_host(
    gated: GatedTower, batcher: Batcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever thread does it: each begins with the first device as its own."""
    current: list[Tensor] = []
    on: list[list[Tensor]] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    class Recording(Readback):
        def wait(self) -> list[Tensor]:
            on.append([*current])
            return super().wait()

    def keep(embeds: Tensor, *others: Any) -> Tensor:
        on.append([*current])
        return keep_tokens(embeds, *others)

    await asyncio.to_thread(batcher.close)
    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(items, "Readback", Recording)
    monkeypatch.setattr(items, "keep_tokens", keep)
    await obtained(0.5, gated, batcher, torch.ones(LEVELS, GRID.tokens, WIDTH))
    assert [[each.shape for each in devices] for devices in on] == [[(LEVELS, GRID.tokens, WIDTH)]] * 2


async def test_at_rate_0_everything_is_kept_and_nothing_is_listed(gated: GatedTower, batcher: Batcher) -> None:
    embeds = await obtained(0, gated, batcher)
    assert embeds.kept is None
    assert embeds.data.nbytes == SIZE_BYTES


async def test_an_item_that_is_brought_is_pruned_like_one_that_was_encoded(gated: GatedTower, batcher: Batcher) -> None:
    rows = torch.arange(1.0, 1 + GRID.tokens)[:, None] * torch.linspace(0, 1, WIDTH)
    embeds = await obtained(0.5, gated, batcher, torch.stack([rows, 100 + rows]).bfloat16())
    assert embeds.kept is not None
    # Of multiples of one vector, slice 0 and then those that bfloat16 turned the most; all levels by the same mask.
    assert embeds.kept.size == 12
    sent = np.frombuffer(embeds.data, np.float32).reshape(embeds.shape)
    expected = torch.stack([rows, 100 + rows]).bfloat16().float()[:, embeds.kept.tolist()]
    assert (embeds.dtype, sent.tolist()) == (DType.FLOAT32, expected.tolist())


async def test_an_item_larger_than_all_the_room_is_refused_at_once(gated: GatedTower, batcher: Batcher) -> None:
    cache, outputs = EmbedsCache(TOWER, batcher, ByteSemaphore(SIZE_BYTES - 1), 0), ByteSemaphore(SIZE_BYTES - 1)
    item = Item(0, VIDEO, Pruning(0.75), cache, outputs)
    with pytest.raises(MediaRejected, match=f"media 0 becomes 24 tokens, {SIZE_BYTES} bytes of embeddings"):
        await item.start(OneStream(gated), None)
    item.close()
    assert (cache.room.held_bytes, outputs.held_bytes) == (0, 0)


IMAGE = replace(
    VIDEO,
    modality=Modality.IMAGE,
    grid=Grid(1, 4, 6),
    frames=1,
    frame_height_px=4,
    frame_width_px=6,
    seconds_per_grid=None,
)
BROUGHT = replace(VIDEO, frames=0, frame_height_px=0, frame_width_px=0)


@pytest.mark.parametrize(
    ("plan", "remedy"),
    [
        (VIDEO, "lower fps or max_frames (now 6 frames), or max_pixels (now 2×2 a frame)"),
        (IMAGE, "lower max_pixels (now 4×6 a frame)"),
        (BROUGHT, "bring fewer than the 6×2×2 of embeds.grid"),
    ],
)
async def test_who_is_refused_is_told_which_fields_what_they_came_to_and_the_limit(
    gated: GatedTower, batcher: Batcher, plan: MediaPlan, remedy: str
) -> None:
    room = ByteSemaphore(SIZE_BYTES - 1)
    item = Item(3, plan, Pruning(0.75), EmbedsCache(TOWER, batcher, room, 0), ByteSemaphore(SIZE_BYTES))
    with pytest.raises(MediaRejected) as refused:
        await item.start(OneStream(gated), None)
    assert str(refused.value) == (
        f"media 3 becomes 24 tokens, {SIZE_BYTES} bytes of embeddings; the encoder has room for {SIZE_BYTES - 1} "
        f"bytes, 23 tokens: {remedy}"
    )


class OneSliceAtATime(OneStream):
    """Brings its item's slices when it is told to."""

    def __init__(self) -> None:
        self.entry: Entry | None = None

    async def select(self, media_index: int, entry: Entry) -> None:
        self.entry = entry

    def brings(self, entry: Entry) -> bool:
        return self.entry is entry


async def test_who_shares_an_item_is_told_that_the_tower_ended_before_its_last_slice(
    gated: GatedTower, batcher: Batcher
) -> None:
    cache, outputs, stream = (
        EmbedsCache(TOWER, batcher, ByteSemaphore(2 * SIZE_BYTES), 0),
        ByteSemaphore(3 * SIZE_BYTES),
        OneSliceAtATime(),
    )
    leader, sharer, late = (Item(0, VIDEO, Pruning(0), cache, outputs) for _ in range(3))
    await leader.start(stream, None)
    await sharer.start(OneSliceAtATime(), None)
    waiting = asyncio.create_task(sharer.obtain(OneSliceAtATime(), lambda _: None))
    assert stream.entry is not None
    for _ in range(GRID.t):
        gated.gate.release()
    for index in range(GRID.t - 1):
        await stream.entry.encoding.add(slice_of(1, index))
    batcher.close()  # as a device that is lost ends it
    with pytest.raises(Unavailable, match="the tower of the encoder has ended"):
        await stream.entry.encoding.add(slice_of(1, GRID.t - 1))
    stream.entry.lose(stream, None)
    await late.start(OneSliceAtATime(), None)
    assert late.decoded_slices == 0  # of an entry of its own, which another stream may bring
    with pytest.raises(Unavailable, match="the tower of the encoder has ended"):
        await asyncio.wait_for(waiting, TIMEOUT_S)
    for item in (leader, sharer, late):
        item.close()
    assert (cache.room.held_bytes, outputs.held_bytes) == (0, 0)
