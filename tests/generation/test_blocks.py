"""The allocator never gives a block away that somebody holds, never loses one, and finds what it remembers."""

from __future__ import annotations

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generation.kv_cache.blocks import BlockAllocator
from services.generation.request.request import ROOT


@given(total=st.integers(1, 30), actions=st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=60))
def test_every_block_is_free_or_has_one_owner(total: int, actions: list[tuple[bool, int]]) -> None:
    allocator = BlockAllocator(total, block_tokens=16)
    owned: list[list[int]] = []
    for take, number in actions:
        if take and number <= allocator.free:
            owned.append(allocator.allocate(number))
            assert len(owned[-1]) == number
        elif owned:
            allocator.decref(owned.pop(number % len(owned)))
        held = [block for blocks in owned for block in blocks]
        assert len(set(held)) == len(held) == allocator.used
        assert set(held) <= set(range(total))
        assert allocator.free + allocator.used == total
        allocator.check_integrity(owned)


def test_a_request_alone_gets_neighbouring_blocks() -> None:
    allocator = BlockAllocator(8, block_tokens=16)
    allocator.decref(allocator.allocate(5))
    assert allocator.allocate(3) + allocator.allocate(2) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_tokens_are_rounded_up_to_blocks(tokens: int, blocks: int) -> None:
    assert BlockAllocator(8, block_tokens=16).blocks_for(tokens) == blocks


@pytest.mark.parametrize("owned", [[[0], [0, 1, 2, 3]], [[0, 1]], [[0, 1, 2, 3], [3]]])
def test_the_integrity_check_finds_blocks_lost_or_held_by_others_than_are_counted(owned: list[list[int]]) -> None:
    allocator = BlockAllocator(4, block_tokens=16)
    allocator.allocate(4)
    with pytest.raises(AssertionError, match="reference counts differ"):
        allocator.check_integrity(owned)


def test_a_remembered_block_is_found_behind_its_own_parent_alone_and_held_by_several() -> None:
    allocator = BlockAllocator(4, block_tokens=16)
    blocks = allocator.allocate(3)
    first = allocator.cache(blocks[0], ROOT, b"a", ())
    second = allocator.cache(blocks[1], first, b"b", ())
    allocator.decref(blocks)
    assert (allocator.free, allocator.idle, allocator.used) == (4, 2, 0)
    assert allocator.lookup(ROOT, b"b") is allocator.lookup(second, b"b") is allocator.lookup(first, b"a") is None
    found = allocator.lookup(first, b"b")
    assert found
    assert found.block == blocks[1]
    for _ in range(2):
        allocator.incref([found.block])
    assert (allocator.free, allocator.idle) == (3, 1)
    allocator.check_integrity([[found.block], [found.block]])
    allocator.decref([found.block])
    assert allocator.free == 3
    allocator.decref([found.block])
    assert allocator.free == 4


def test_the_same_content_computed_twice_is_remembered_once() -> None:
    allocator = BlockAllocator(2, block_tokens=16)
    mine, others = allocator.allocate(1), allocator.allocate(1)
    serial = allocator.cache(mine[0], ROOT, b"a", ())
    assert allocator.cache(others[0], ROOT, b"a", ()) == serial
    allocator.decref(others)
    assert allocator.idle == 0
    allocator.check_integrity([mine])


def test_what_was_let_go_first_is_forgotten_first_and_the_end_of_a_prompt_before_its_beginning() -> None:
    allocator = BlockAllocator(5, block_tokens=16)
    chains = {name: allocator.allocate(2) for name in ("old", "new")}
    for name, blocks in chains.items():
        parent = allocator.cache(blocks[0], ROOT, name.encode(), ())
        allocator.cache(blocks[1], parent, b"end", ())
        allocator.decref(blocks)

    def remembered() -> list[int]:
        return [sum(allocator.lookup(*key) is not None for key in keys[name]) for name in ("old", "new")]

    roots = {name: allocator.lookup(ROOT, name.encode()) for name in chains}
    keys = {name: [(ROOT, name.encode()), (known.serial, b"end")] for name, known in roots.items() if known}
    assert remembered() == [2, 2]
    allocator.allocate(2)  # one of them was empty
    assert remembered() == [1, 2]
    assert allocator.lookup(ROOT, b"old") is roots["old"]
    allocator.allocate(2)
    assert remembered() == [0, 1]


def test_a_serial_is_never_given_again() -> None:
    """A block that was forgotten and holds something else now must not pass for the parent of what followed it."""
    allocator = BlockAllocator(2, block_tokens=16)
    blocks = allocator.allocate(2)
    first = allocator.cache(blocks[0], ROOT, b"a", ())
    allocator.decref(blocks)
    again = allocator.allocate(2)
    assert allocator.lookup(ROOT, b"a") is None
    assert allocator.cache(again[0], ROOT, b"a", ()) != first


def test_what_owns_a_remembered_block_lives_as_long() -> None:
    class Owner:
        pass

    owner = Owner()
    seen = weakref.ref(owner)
    allocator = BlockAllocator(1, block_tokens=16)
    blocks = allocator.allocate(1)
    allocator.cache(blocks[0], ROOT, b"a", (owner,))
    allocator.decref(blocks)
    del owner
    assert seen()
    allocator.allocate(1)
    assert not seen()
