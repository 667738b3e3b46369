"""The cache: what a key depends on, what is evicted, and that a second request encodes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.byte_semaphore import ByteSemaphore
from common.contract.plan import Grid, MediaPlan, Modality, Run, tagged_digest
from common.contract.retention import Pruning
from framesieve.v1.preprocessing_pb2 import PreprocessResponse
from services.encoder.items.batcher import Batcher
from services.encoder.items.cache import EmbedsCache, cache_key
from services.encoder.items.cache_entry import CacheEntry
from services.encoder.pruning.methods import keep_tokens
from services.encoder.tower.patches import PatchShape
from services.encoder.tower.tower import Tower, TowerSizes
from tests.encoder.encoder_peers import GRID, IMAGE, Media, video
from tests.encoder.encoder_service import (
    SELECT_ALL,
    Stack,
    check_idle,
    embeds_in,
    encode,
    first_request,
    kept_bytes,
    metric,
    running,
)

VIDEO = MediaPlan(
    modality=Modality.VIDEO,
    grid=Grid(2, 3, 4),
    runs=(Run(5, 24),),
    frames=2,
    frame_height_px=3,
    frame_width_px=4,
    seconds_per_grid=Fraction(1),
    timestamps_s=(0.0, 1.0),
    content_hash=b"c" * 32,
)
TOWER = Tower(
    forward=lambda patches, grids: patches,
    patches=PatchShape(patch_px=1, merge=1, temporal_patch=1),
    embed_dim=8,
    embed_levels=1,
    dtype=torch.float32,
    device=torch.device("cpu"),
    sizes=TowerSizes(hidden=1, patch_weights=1, token_weights=0, full_layers=0),
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


def test_a_part_is_not_taken_for_the_domain() -> None:
    assert tagged_digest(b"da", [b"b"]) != tagged_digest(b"d", [b"ab"])
    assert tagged_digest(b"d", []) != tagged_digest(b"e", [])


def retyped(grid: Grid) -> MediaPlan:
    size = {"frame_height_px": grid.h, "frame_width_px": grid.w}
    return replace(VIDEO, grid=grid, runs=(Run(0, grid.tokens),), frames=grid.t, timestamps_s=(), **size)


SIDE = st.integers(1, 150)
GRIDS = st.one_of(
    st.tuples(st.just(Modality.VIDEO), st.builds(Grid, SIDE, SIDE, SIDE)),
    st.tuples(st.just(Modality.IMAGE), st.builds(Grid, st.just(1), SIDE, SIDE)),
)
KEYED = st.tuples(
    st.sampled_from([bytes(32), b"\0" * 31 + b"\x01", b"video".ljust(32, b"\0"), b"c" * 32]),
    GRIDS,
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 16),
)


@given(KEYED, KEYED)
def test_keys_are_equal_if_everything_that_determines_the_embeddings_is(
    left: tuple[bytes, tuple[Modality, Grid], torch.dtype, int],
    right: tuple[bytes, tuple[Modality, Grid], torch.dtype, int],
) -> None:
    def key(content: bytes, media: tuple[Modality, Grid], dtype: torch.dtype, levels: int) -> bytes:
        modality, grid = media
        base = Fraction(1) if modality is Modality.VIDEO else None
        item = replace(retyped(grid), content_hash=content, modality=modality, seconds_per_grid=base)
        return cache_key(item, dtype, levels)

    assert (key(*left) == key(*right)) == (left == right)


# --- eviction ---------------------------------------------------------------------------------------------------


@pytest.fixture
def batcher() -> Iterator[Batcher]:
    batcher = Batcher(lambda slices: [], budget_tokens=64)
    yield batcher
    batcher.close()


ITEM_BYTES = 2 * 24 * 8 * 4
KEPT_BYTES = ITEM_BYTES + 12 * 24


def sized(content: int) -> MediaPlan:
    return replace(retyped(Grid(1 + content % 3, 3, 4)), content_hash=bytes([content]) * 32)


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


def bytes_of(content: int) -> int:
    return KEPT_BYTES // 2 * (1 + content % 3)


@given(st.integers(0, 8), st.lists(st.one_of(st.integers(0, 9), st.just("leave")), max_size=40), st.data())
async def test_the_cache_keeps_what_a_naive_lru_cache_keeps(
    halves: int, steps: list[int | str], data: st.DataObject
) -> None:
    batcher = Batcher(lambda slices: [], budget_tokens=64)
    cache = EmbedsCache(TOWER, batcher, ByteSemaphore(100 * ITEM_BYTES), halves * KEPT_BYTES // 2)
    naive = NaiveCache(cache.size_bytes)
    reading: list[tuple[int, CacheEntry]] = []

    def leave(index: int) -> None:
        content, entry = reading.pop(index)
        cache.leave(entry)
        naive.leave(content)
        assert cache.held_bytes == naive.held_bytes <= cache.size_bytes
        assert all(each.embeds.numel() for _, each in reading)  # nothing that is read is evicted

    for step in steps:
        if isinstance(step, int):
            entry = cache.join(sized(step))
            assert entry.kept == (step in naive.kept)
            assert entry.complete == (step in naive.kept or step in naive.readers)
            await entry.reserve()
            entry.encoded_slices = entry.plan.grid.t
            reading.append((step, entry))
            naive.readers.append(step)
        elif reading:
            leave(data.draw(st.integers(0, len(reading) - 1)))
    while reading:
        leave(0)
    assert [content for content in range(10) if cache.join(sized(content)).kept] == sorted(naive.kept)
    assert cache.encoding_bytes.held_bytes == 0
    batcher.close()


async def test_an_entry_that_is_left_before_it_is_complete_is_dropped(batcher: Batcher) -> None:
    cache = EmbedsCache(TOWER, batcher, ByteSemaphore(ITEM_BYTES), KEPT_BYTES)
    entry = cache.join(VIDEO)
    await entry.reserve()
    cache.leave(entry)
    assert (cache.encoding_bytes.held_bytes, cache.held_bytes) == (0, 0)
    assert cache.join(VIDEO) is not entry


@pytest.mark.parametrize("items", [1000, 100])
async def test_the_cost_of_a_request_does_not_depend_on_the_number_of_kept_entries(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch, items: int
) -> None:
    """With space for all, and with an eviction per request, while some entries are being read."""
    looked_at: list[CacheEntry] = []

    def size_bytes(entry: CacheEntry) -> int:
        looked_at.append(entry)
        return KEPT_BYTES

    monkeypatch.setattr(CacheEntry, "size_bytes", property(size_bytes))
    cache = EmbedsCache(TOWER, batcher, ByteSemaphore(10 * ITEM_BYTES), items * KEPT_BYTES)
    for content in range(600):
        entry = cache.join(replace(VIDEO, content_hash=content.to_bytes(32)))
        entry.encoded_slices = VIDEO.grid.t
        cache.leave(entry)
        if content < 50:
            cache.join(entry.plan)
    assert cache.held_bytes == min(items, 600) * KEPT_BYTES
    assert len(looked_at) < 10 * 600


# --- over gRPC --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rate", "method"), [(0.25, "evs"), (0.75, "evs"), (0.5, "vidcom2"), (0.5, "random")])
async def test_a_second_request_gathers_from_the_cached_embeddings(stack: Stack, rate: float, method: str) -> None:
    """Wherever in the prompt the video is, and by whatever rate and method."""
    unpruned = embeds_in(await encode(stack, first_request([video(7), IMAGE]), SELECT_ALL))[0].embeds
    hits, forwards = metric("cache_lookups_total", outcome="hit"), metric("batch_tokens_count")
    media = [Media(Modality.IMAGE, IMAGE.grid, content=1), video(7), video(7)]
    responses = await encode(stack, first_request(media, rate, method), SELECT_ALL)
    kept = keep_tokens(torch.from_numpy(unpruned[0].copy()), GRID, Pruning(rate, method)).tolist()
    for pruned in list(embeds_in(responses).values())[1:]:
        assert pruned.kept == kept
        np.testing.assert_array_equal(pruned.embeds, unpruned[:, kept])
    assert stack.preprocessing.selected == [0, 1]
    assert metric("batch_tokens_count") == forwards
    assert metric("cache_lookups_total", outcome="hit") == hits + 3
    assert [each.WhichOneof("response") for each in responses] == ["plan", *["progress", "embeds"] * 3]


async def test_repaired_frames_are_cached(stack: Stack) -> None:
    def repair(messages: list[PreprocessResponse]) -> list[PreprocessResponse]:
        for message in messages[:2]:
            message.frames.repaired_frames = 1
        return messages

    stack.preprocessing.bend_frames = repair
    for _ in range(2):
        responses = await encode(stack, first_request([video(7)]), SELECT_ALL)
        assert [each.embeds.repaired_frames for each in responses if each.HasField("embeds")] == [2]
    assert stack.preprocessing.selected == [0]


@pytest.mark.parametrize(
    ("asked", "cached_items", "decoded", "evicted"),
    [
        ([1, 2, 1, 3, 1, 2], 2, 4, 2),  # 3 evicts 2, and 2 evicts 3
        ([1, 2, 30, 30, 1], 2, 4, 3),  # 30, twice as large, evicts 1 and 2; 1 evicts 30
        ([1, 30, 30, 1], 1, 3, 0),  # 30 does not fit, and evicts nothing
        ([1, 1], 0, 2, 0),
    ],
)
async def test_the_least_recently_used_items_are_evicted(
    tmp_path: Path, tower: Tower, asked: list[int], cached_items: int, decoded: int, evicted: int
) -> None:
    async with running(tmp_path, tower, cache_bytes=cached_items * kept_bytes(tower)) as stack:
        evictions = metric("cache_evictions_total")
        for content in asked:
            media = video(content, Grid(8, 2, 3) if content == 30 else GRID)
            await encode(stack, first_request([media]), SELECT_ALL)
            assert metric("cache_used_bytes") == stack.cache.held_bytes <= cached_items * kept_bytes(tower)
        assert len(stack.preprocessing.selected) == decoded
        assert metric("cache_evictions_total") == evictions + evicted
        await check_idle(stack)
