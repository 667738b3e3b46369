"""What embeddings are known by, and who gives way: without a server, without a stream."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.byte_semaphore import ByteSemaphore
from common.contract.plan import tagged_digest
from common.contract.plan import Grid, MediaPlan, Modality, Run
from services.encoder.items.batcher import Batcher
from services.encoder.items.cache import EmbedsCache, Entry
from services.encoder.items.cache_key import cache_key
from services.encoder.tower.cost import TowerSizes
from services.encoder.tower.patches import PatchShape
from services.encoder.tower.tower import Tower

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

# Few and alike, so that different lists often run together to the same bytes.
PIECES = st.lists(st.sampled_from([b"", b"a", b"aa", b"\0", b"\0" * 8, b"\x01" + b"\0" * 7, b"a" + b"\0" * 7]))


@given(PIECES, PIECES)
def test_no_two_lists_of_parts_have_one_digest(left: list[bytes], right: list[bytes]) -> None:
    assert (tagged_digest(b"d", left) == tagged_digest(b"d", right)) == (left == right)


@given(PIECES, st.data())
def test_bytes_that_move_to_another_part_make_another_digest(parts: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=4)))
    moved = [whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
    assert (tagged_digest(b"d", parts) == tagged_digest(b"d", moved)) == (parts == moved)


def test_parts_do_not_pass_for_a_domain() -> None:
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
def test_keys_are_equal_where_all_that_decides_the_embeddings_is(
    left: tuple[bytes, tuple[Modality, Grid], torch.dtype, int],
    right: tuple[bytes, tuple[Modality, Grid], torch.dtype, int],
) -> None:
    def key(content: bytes, media: tuple[Modality, Grid], dtype: torch.dtype, levels: int) -> bytes:
        modality, grid = media
        base = Fraction(1) if modality is Modality.VIDEO else None
        item = replace(retyped(grid), content_hash=content, modality=modality, seconds_per_grid=base)
        return cache_key(item, dtype, levels)

    assert (key(*left) == key(*right)) == (left == right)


@pytest.mark.parametrize("grid", [Grid(2, 4, 3), Grid(4, 3, 2), Grid(24, 1, 1), Grid(1, 1, 24), Grid(1, 12, 2)])
def test_grids_of_as_many_tokens_are_told_apart(grid: Grid) -> None:
    assert cache_key(retyped(grid), torch.float32, 0) != cache_key(VIDEO, torch.float32, 0)


def test_where_the_tokens_stand_takes_no_part() -> None:
    elsewhere = replace(VIDEO, runs=(Run(0, 4), Run(90, 20)))
    assert cache_key(elsewhere, torch.float32, 0) == cache_key(VIDEO, torch.float32, 0)


# --- who gives way ----------------------------------------------------------------------------------------------


@pytest.fixture
def batcher() -> Iterator[Batcher]:
    batcher = Batcher(lambda slices: [], budget_tokens=64)
    yield batcher
    batcher.close()


ITEM_BYTES = 2 * 24 * 8 * 4
KEPT_BYTES = ITEM_BYTES + 12 * 24


def cache_of(items: int, batcher: Batcher) -> EmbedsCache:
    return EmbedsCache(TOWER, batcher, ByteSemaphore(10 * ITEM_BYTES), items * KEPT_BYTES)


def item(content: int) -> MediaPlan:
    return replace(VIDEO, content_hash=bytes([content]) * 32)


async def asked(cache: EmbedsCache, content: int) -> Entry:
    """An entry that the caller has not left, complete."""
    entry = cache.join(item(content))
    if not entry.encoding.complete:
        await entry.encoding.reserve()
        await entry.encoding.fill(torch.full((2, 24, 8), float(content)))
    return entry


async def keep(cache: EmbedsCache, contents: Sequence[int]) -> None:
    for content in contents:
        cache.leave(await asked(cache, content))


def kept(cache: EmbedsCache, contents: Sequence[int]) -> list[int]:
    """Which of these are kept; asks for them, the last first."""
    found = []
    for content in contents:
        entry = cache.join(item(content))
        if entry.encoding.complete:
            found.append(content)
        cache.leave(entry)
    return found


async def test_the_least_recently_asked_for_gives_way(batcher: Batcher) -> None:
    cache = cache_of(3, batcher)
    await keep(cache, [1, 2, 3, 1, 4, 5])
    assert kept(cache, [1, 2, 3, 4, 5]) == [1, 4, 5]
    assert cache.held_bytes == 3 * KEPT_BYTES
    assert cache.room.held_bytes == 0


async def test_what_is_being_read_does_not_give_way(batcher: Batcher) -> None:
    cache = cache_of(2, batcher)
    await keep(cache, [1, 2])
    reading = await asked(cache, 1)
    await keep(cache, [2, 3, 4])
    assert (reading.encoding.embeds == 1).all()
    cache.leave(reading)
    assert kept(cache, [1, 2, 3, 4]) == [1, 4]
    assert cache.held_bytes == 2 * KEPT_BYTES


async def test_where_everything_is_being_read_the_newest_is_not_kept(batcher: Batcher) -> None:
    cache = cache_of(1, batcher)
    await keep(cache, [1])
    reading = await asked(cache, 1)
    await keep(cache, [2])
    assert kept(cache, [2]) == []
    cache.leave(reading)
    assert kept(cache, [1]) == [1]
    assert (cache.held_bytes, cache.room.held_bytes) == (KEPT_BYTES, 0)


async def test_room_is_given_back_once_the_last_reader_has_left(batcher: Batcher) -> None:
    for items in (0, 1):
        cache = cache_of(items, batcher)
        first, second = await asked(cache, 1), await asked(cache, 1)
        assert first is second
        cache.leave(first)
        assert cache.room.held_bytes == ITEM_BYTES
        cache.leave(second)
        assert (cache.room.held_bytes, cache.held_bytes) == (0, items * KEPT_BYTES)


async def test_a_byte_less_than_an_item_keeps_nothing(batcher: Batcher) -> None:
    cache = EmbedsCache(TOWER, batcher, ByteSemaphore(ITEM_BYTES), KEPT_BYTES - 1)
    await keep(cache, [1])
    assert kept(cache, [1]) == []
    assert cache.held_bytes == 0


async def test_what_failed_is_made_anew_for_who_asks_next(batcher: Batcher) -> None:
    cache = cache_of(1, batcher)
    failed = cache.join(item(1))
    failed.encoding.fail(RuntimeError("the tower fell"))
    again = await asked(cache, 1)
    assert again is not failed
    cache.leave(failed)
    cache.leave(again)
    assert kept(cache, [1]) == [1]


async def test_what_nobody_waits_for_before_it_is_complete_is_not_kept(batcher: Batcher) -> None:
    cache = cache_of(1, batcher)
    entry = cache.join(item(1))
    await entry.encoding.reserve()
    cache.leave(entry)
    assert (cache.room.held_bytes, cache.held_bytes) == (0, 0)
    assert kept(cache, [1]) == []


def sized(content: int) -> MediaPlan:
    return replace(retyped(Grid(1 + content % 3, 3, 4)), content_hash=bytes([content]) * 32)


class NaiveCache:
    """What is kept, by content, and read by how many, summed up anew whenever somebody asks."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.kept: list[int] = []  # the least recently left first
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
async def test_what_is_kept_is_what_a_naive_cache_keeps(
    halves: int, steps: list[int | str], data: st.DataObject
) -> None:
    batcher = Batcher(lambda slices: [], budget_tokens=64)
    cache = EmbedsCache(TOWER, batcher, ByteSemaphore(100 * ITEM_BYTES), halves * KEPT_BYTES // 2)
    naive = NaiveCache(cache.size_bytes)
    reading: list[tuple[int, Entry]] = []

    def leave(index: int) -> None:
        content, entry = reading.pop(index)
        cache.leave(entry)
        naive.leave(content)
        assert cache.held_bytes == naive.held_bytes <= cache.size_bytes

    for step in steps:
        if isinstance(step, int):
            entry = cache.join(sized(step))
            assert entry.kept == (step in naive.kept)
            assert entry.encoding.complete == (step in naive.kept or step in naive.readers)
            await entry.encoding.reserve()
            entry.encoding.encoded_slices = entry.encoding.plan.grid.t
            reading.append((step, entry))
            naive.readers.append(step)
        elif reading:
            leave(data.draw(st.integers(0, len(reading) - 1)))
    while reading:
        leave(0)
    assert [content for content in range(10) if cache.join(sized(content)).kept] == sorted(naive.kept)
    batcher.close()


@pytest.mark.parametrize("items", [1000, 100])
async def test_however_many_are_kept_another_costs_the_same(
    batcher: Batcher, monkeypatch: pytest.MonkeyPatch, items: int
) -> None:
    """Where there is room for all, and where each has another give way, while some are being read."""
    looked_at: list[Entry] = []

    def size_bytes(entry: Entry) -> int:
        looked_at.append(entry)
        return KEPT_BYTES

    monkeypatch.setattr(Entry, "size_bytes", property(size_bytes))
    cache = cache_of(items, batcher)
    for content in range(600):
        entry = cache.join(replace(VIDEO, content_hash=content.to_bytes(32)))
        entry.encoding.encoded_slices = VIDEO.grid.t
        cache.leave(entry)
        if content < 50:
            cache.join(entry.encoding.plan)
    assert cache.held_bytes == min(items, 600) * KEPT_BYTES
    assert len(looked_at) < 10 * 600
