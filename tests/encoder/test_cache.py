"""The cache: what a key depends on, what is evicted, how few slices are queued, and that a hit encodes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract.plan import FrameShape, Grid, MediaPlan, Modality, Run, tagged_digest
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.common.contract.tensors import DType, TensorBuffer
from gridsieve.services.encoder.items.batcher import Batcher
from gridsieve.services.encoder.items.cache import EmbedsCache, cache_key
from gridsieve.services.encoder.items.cache_entry import CacheEntry, StageTimes
from gridsieve.services.encoder.items.decoded_slices import FrameSlice
from gridsieve.services.encoder.items.pending_entry import PendingEntry
from gridsieve.services.encoder.pruning.methods import keep_tokens
from gridsieve.services.encoder.tower.packing import TowerShape
from gridsieve.services.encoder.tower.patches import PatchShape
from gridsieve.services.encoder.tower.tower import Tower, TowerSizes
from gridsieve.v1.preprocessing_pb2 import PreprocessResponse
from tests.encoder.encoder_peers import GRID, IMAGE, Media, video
from tests.encoder.encoder_service import (
    SELECT_ALL,
    Stack,
    embeds_in,
    first_request,
    kept_bytes,
    metric,
    running,
    tower_embeds,
)
from tests.encoder.gated_tower import TIMEOUT_S, GatedTower, limit_of

TOWER = Tower(
    forward=lambda patches, grids: patches,
    patches=PatchShape(1, TowerShape(1)),
    embed_dim=2,
    embed_levels=1,
    dtype=torch.float32,
    device=torch.device("cpu"),
    sizes=TowerSizes(hidden=1, patch_weights=1, token_weights=0, full_layers=0),
)
SLICE_TOKENS = 4


def plan_of(slices: int = 2, content: int = 0) -> MediaPlan:
    return MediaPlan(
        modality=Modality.VIDEO,
        grid=Grid(slices, 2, 2),
        runs=(Run(5, slices * SLICE_TOKENS),),
        frames=FrameShape(slices, (2, 2)),
        seconds_per_grid=Fraction(1),
        timestamps_s=(),
        content_hash=bytes([content]) * 32,
    )


# --- keys -------------------------------------------------------------------------------------------------------

# Few and similar, so that different lists often concatenate to the same bytes.
PIECES = st.lists(st.sampled_from([b"", b"a", b"aa", b"\0", b"\0" * 8, b"\x01" + b"\0" * 7, b"a" + b"\0" * 7]))


@given(PIECES, st.data())
def test_bytes_that_move_to_another_part_change_the_digest(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    moved = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert (tagged_digest(b"d", parts) == tagged_digest(b"d", moved)) == (parts == moved)
    assert tagged_digest(b"d" + whole, []) != tagged_digest(b"d", [whole])


def test_a_key_depends_on_everything_that_determines_the_embeddings_and_nothing_else() -> None:
    plan, dtypes = plan_of(), (torch.float32, torch.bfloat16)
    image = replace(plan_of(1), modality=Modality.IMAGE, seconds_per_grid=None)
    plans = [
        plan,
        plan_of(content=1),
        plan_of(4),
        replace(plan, grid=Grid(2, 1, 4), frames=FrameShape(2, (1, 4))),
        plan_of(1),
        image,
    ]
    chosen = [
        None,
        *(ItemPruning(rate, "pixel_change", threshold=least) for rate in (0.25, 0.5) for least in (None, 0, 0.1)),
    ]
    assert len({cache_key(*each) for each in product(plans, [None], dtypes, (0, 3))}) == 6 * 2 * 2
    assert len({cache_key(plan_of(4), each, torch.float32, 0) for each in chosen}) == 7
    elsewhere = replace(plan, runs=(Run(90, plan.grid.tokens),))
    assert cache_key(elsewhere, None, torch.float32, 0) == cache_key(plan, None, torch.float32, 0)


# --- eviction ---------------------------------------------------------------------------------------------------


@pytest.fixture
def gated() -> GatedTower:
    return GatedTower()


@pytest.fixture
def batcher(gated: GatedTower) -> Iterator[Batcher]:
    """One slice per forward."""
    batcher = Batcher(gated.encode, limit_of(SLICE_TOKENS))
    batcher.start()
    yield batcher
    gated.open()
    batcher.close()


SLICE_BYTES = 2 * SLICE_TOKENS * 2 * 4
KEPT_SLICE_BYTES = SLICE_BYTES + 20 * SLICE_TOKENS  # with scores


def sized(content: int) -> MediaPlan:
    return plan_of(1 + content % 3, content)


def bytes_of(content: int) -> int:
    return KEPT_SLICE_BYTES * (1 + content % 3)


class NaiveCache:
    """A model of the cache: kept contents, and readers of each, with all sums computed anew."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.kept: list[int] = []  # least recently used first
        self.readers: list[int] = []

    @property
    def held_bytes(self) -> int:
        return sum(map(bytes_of, self.kept))

    def leave(self, content: int) -> None:
        self.readers.remove(content)
        if content in self.readers:
            return
        if content in self.kept:
            self.kept.remove(content)
        else:
            idle = [each for each in self.kept if each not in self.readers]
            lacking = self.held_bytes + bytes_of(content) - self.size_bytes
            if lacking > sum(map(bytes_of, idle)):
                return
            while lacking > 0:
                lacking -= bytes_of(idle[0])
                self.kept.remove(idle.pop(0))
        self.kept.append(content)


@given(st.integers(0, 8), st.lists(st.one_of(st.integers(0, 9), st.just("leave")), max_size=40), st.data())
async def test_the_cache_keeps_what_a_naive_lru_cache_keeps(
    slices: int, steps: list[int | str], data: st.DataObject
) -> None:
    batcher = Batcher(lambda slices, adapter: [], limit_of(64))
    batcher.start()
    cache = EmbedsCache(TOWER, batcher, ByteSemaphore(1000 * SLICE_BYTES), slices * KEPT_SLICE_BYTES)
    naive = NaiveCache(cache.size_bytes)
    reading: list[tuple[int, PendingEntry | CacheEntry]] = []

    def leave(index: int) -> None:
        content, joined = reading.pop(index)
        cache.leave(joined)
        naive.leave(content)
        assert cache.held_bytes == naive.held_bytes <= cache.size_bytes
        read = sum({each.size_bytes for _, each in reading if isinstance(each, CacheEntry)})
        assert read <= cache.held_bytes

    for step in steps:
        if isinstance(step, int):
            joined = cache.join(sized(step))
            assert isinstance(joined, CacheEntry) == (step in naive.kept)
            if isinstance(joined, PendingEntry):
                assert (joined.entry is not None) == (step in naive.readers)
                await joined.reserve()
                embeds, size_bytes = torch.zeros(2, joined.plan.grid.tokens, 2), bytes_of(step)
                joined.entry = CacheEntry(joined.key, b"", embeds, None, {}, StageTimes(), 0, b"", size_bytes)
            reading.append((step, joined))
            naive.readers.append(step)
        elif reading:
            leave(data.draw(st.integers(0, len(reading) - 1)))
    while reading:
        leave(0)
    cached = [content for content in range(10) if isinstance(cache.join(sized(content)), CacheEntry)]
    assert cached == sorted(naive.kept)
    assert cache.encoding_bytes.held_bytes == 0
    batcher.close()


# --- slices -----------------------------------------------------------------------------------------------------


def slice_of(name: int, index: int) -> FrameSlice:
    buffer = TensorBuffer(DType.UINT8, (1, 2, 2, 3))
    buffer.copy_piece(DType.UINT8, (1, 2, 2, 3), 0, bytes([name, SLICE_TOKENS] * 6))
    return FrameSlice(index, buffer, repaired_frames=0, decoded_ns=0, resized_ns=0)


async def test_a_slow_tower_holds_the_decoder_back_until_the_entry_is_closed(
    batcher: Batcher, gated: GatedTower
) -> None:
    semaphore = ByteSemaphore(100 * SLICE_BYTES)
    entry, other = (PendingEntry(b"", b"", plan_of(6), TOWER, batcher, semaphore) for _ in range(2))
    await entry.reserve()
    await other.reserve()
    for index in (0, 1):
        await entry.add_slice(slice_of(1 + index, index))
    assert await asyncio.to_thread(gated.begun)
    third = asyncio.create_task(entry.add_slice(slice_of(3, 2)))
    await asyncio.sleep(0.05)
    assert not third.done()
    gated.open(1)
    await asyncio.wait_for(third, TIMEOUT_S)
    assert await asyncio.to_thread(gated.begun)  # the forward of slice 2
    fourth = asyncio.create_task(entry.add_slice(slice_of(4, 3)))
    await asyncio.sleep(0)
    await other.add_slice(slice_of(7, 0))
    entry.close()
    entry.close()
    await asyncio.wait_for(fourth, TIMEOUT_S)
    assert semaphore.held_bytes == 6 * SLICE_BYTES
    gated.open()
    while not other.encoded_slices:
        await asyncio.wait_for(other.wait_for_change(), TIMEOUT_S)
    assert gated.forwards == [[1], [2], [7]]  # 2 was running; 3 has left the queue
    other.close()


async def test_an_entry_without_memory_for_its_buffer_holds_no_bytes(batcher: Batcher) -> None:
    semaphore = ByteSemaphore(SLICE_BYTES)
    entry = PendingEntry(b"", b"", plan_of(1), TOWER, batcher, semaphore)
    with patch.object(torch, "empty", side_effect=torch.OutOfMemoryError), pytest.raises(torch.OutOfMemoryError):
        await entry.reserve()
    assert semaphore.held_bytes == 0


# --- over gRPC --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "method"), [(0.75, "evs"), (0.5, "random")])
async def test_a_second_request_gathers_from_the_cached_embeddings(stack: Stack, rate: float, method: str) -> None:
    """Wherever in the prompt the video is, and by whatever rate and method."""
    unpruned = embeds_in(await stack.encode(first_request([video(7), IMAGE]), SELECT_ALL))[0].embeds
    hits, forwards = metric("cache_lookups_total", outcome="hit"), metric("batch_tokens_count")
    media = [Media(Modality.IMAGE, IMAGE.grid, content=1), video(7), video(7)]
    responses = await stack.encode(first_request(media, rate, method), SELECT_ALL)
    kept = keep_tokens(torch.from_numpy(unpruned[0].copy()), GRID, ItemPruning(rate, method)).tolist()
    for pruned in list(embeds_in(responses).values())[1:]:
        assert pruned.kept == kept
        np.testing.assert_array_equal(pruned.embeds, unpruned[:, kept])
    assert stack.preprocessing.selected == [0, 1]
    assert metric("batch_tokens_count") == forwards
    assert metric("cache_lookups_total", outcome="hit") == hits + 3
    assert metric("cache_used_bytes") == stack.cache.held_bytes > 0
    assert [each.WhichOneof("response") for each in responses] == ["plan", *["progress", "embeds"] * 3]


async def test_slices_are_found_by_content_as_long_as_their_item_is_cached(tmp_path: Path, tower: Tower) -> None:
    """Videos of equal content begin alike."""
    async with running(tmp_path, tower, cache_bytes=kept_bytes(tower, 6 * GRID.slice_tokens)) as stack:
        for content, slices, found in ((7, 4, 0), (7, 6, 4), (8, 6, 0), (7, 5, 0)):
            asked, reused = video(content, Grid(slices, 2, 3)), metric("reused_slices_total", source="cached")
            received = embeds_in(await stack.encode(first_request([asked]), SELECT_ALL))[0]
            np.testing.assert_allclose(received.embeds, tower_embeds(tower, 0, asked), atol=1e-5)
            assert metric("reused_slices_total", source="cached") == reused + found
            await stack.check_idle()


async def test_repaired_frames_are_cached(stack: Stack) -> None:
    def repair(messages: list[PreprocessResponse]) -> list[PreprocessResponse]:
        for message in messages[:2]:
            message.frames.repaired_frames = 1
        return messages

    stack.preprocessing.bend_frames = repair
    for _ in range(2):
        responses = await stack.encode(first_request([video(7)]), SELECT_ALL)
        assert [each.embeds.repaired_frames for each in responses if each.HasField("embeds")] == [2]
    assert stack.preprocessing.selected == [0]
