"""The allocator never hands out a referenced block, never loses one, and finds cached blocks by content and parent."""

from __future__ import annotations

import threading
import weakref

from gridsieve.services.generation.memory.blocks import ROOT, BlockAllocator


def test_a_single_request_gets_neighbouring_blocks() -> None:
    allocator = BlockAllocator(8, block_tokens=16)
    allocator.decref(allocator.allocate(5))
    assert allocator.allocate(3) + allocator.allocate(2) == [0, 1, 2, 3, 4]


def test_the_least_recently_released_prefix_is_evicted_first_from_its_end() -> None:
    allocator = BlockAllocator(5, block_tokens=16)
    keys = {}
    for name in (b"old", b"new"):
        blocks = allocator.allocate(2)
        parent = allocator.cache(blocks[0], ROOT, name, ())
        allocator.cache(blocks[1], parent, b"end", ())
        keys[name] = [(ROOT, name), (parent, b"end")]
        allocator.decref(blocks)

    def found(name: bytes) -> list[bool]:
        return [allocator.lookup(*key) is not None for key in keys[name]]

    allocator.allocate(2)  # one empty block and one evicted
    assert (found(b"old"), found(b"new")) == ([True, False], [True, True])
    allocator.allocate(2)
    assert (found(b"old"), found(b"new")) == ([False, False], [True, False])


def test_owners_live_until_their_block_is_evicted() -> None:
    owner = threading.Event()
    seen = weakref.ref(owner)
    allocator = BlockAllocator(1, block_tokens=16)
    blocks = allocator.allocate(1)
    allocator.cache(blocks[0], ROOT, b"a", (owner,))
    allocator.decref(blocks)
    del owner
    assert seen()
    allocator.allocate(1)
    assert not seen()
