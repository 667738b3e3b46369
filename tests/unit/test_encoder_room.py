"""Room: bytes are given first come, first served, and come back whatever happens to who waits."""

from __future__ import annotations

import asyncio

import pytest

from services.encoder.room import Room


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_fits_is_admitted_at_once() -> None:
    room = Room(10)
    await room.reserve(4)
    await room.reserve(6)
    assert room.reserved_bytes == 10


async def test_a_small_reservation_does_not_overtake_a_large_one() -> None:
    room = Room(10)
    await room.reserve(5)
    admitted: list[str] = []

    async def reserve(name: str, size_bytes: int) -> None:
        await room.reserve(size_bytes)
        admitted.append(name)

    waiting = [asyncio.create_task(reserve(name, size)) for name, size in (("large", 8), ("small", 1), ("tiny", 1))]
    await settle()
    assert admitted == []
    room.release(5)
    await asyncio.gather(*waiting)
    assert admitted == ["large", "small", "tiny"]
    assert room.free_bytes == 0


async def test_whoever_gives_up_lets_those_behind_pass() -> None:
    room = Room(10)
    await room.reserve(5)
    large = asyncio.create_task(room.reserve(8))
    await settle()
    small = asyncio.create_task(room.reserve(3))
    await settle()
    assert not small.done()
    large.cancel()
    await small
    assert room.reserved_bytes == 8


async def test_whoever_is_cancelled_when_just_admitted_holds_nothing() -> None:
    room = Room(10)
    await room.reserve(10)
    waiter = asyncio.create_task(room.reserve(7))
    await settle()
    room.release(10)  # admits the waiter, which has not run since
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert room.free_bytes == 10


async def test_whoever_is_cancelled_just_before_it_would_be_admitted_holds_nothing() -> None:
    room = Room(10)
    await room.reserve(10)
    waiter, behind = (asyncio.create_task(room.reserve(7)) for _ in range(2))
    await settle()
    waiter.cancel()
    room.release(10)
    await behind
    assert room.free_bytes == 3
