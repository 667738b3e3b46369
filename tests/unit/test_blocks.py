"""The allocator never gives a block to two owners and never loses one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.generation.blocks import BlockAllocator


@given(total=st.integers(1, 30), actions=st.lists(st.tuples(st.booleans(), st.integers(0, 8)), max_size=60))
def test_every_block_is_free_or_has_one_owner(total: int, actions: list[tuple[bool, int]]) -> None:
    allocator = BlockAllocator(total, block_tokens=16)
    owned: list[list[int]] = []
    for take, number in actions:
        if take and number <= allocator.free:
            owned.append(allocator.allocate(number))
            assert len(owned[-1]) == number
        elif owned:
            allocator.release(owned.pop(number % len(owned)))
        held = [block for blocks in owned for block in blocks]
        assert len(set(held)) == len(held) == allocator.used
        assert set(held) <= set(range(total))
        assert allocator.free + allocator.used == total
        allocator.check_integrity(owned)


def test_a_request_alone_gets_neighbouring_blocks() -> None:
    allocator = BlockAllocator(8, block_tokens=16)
    allocator.release(allocator.allocate(5))
    assert allocator.allocate(3) + allocator.allocate(2) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (160, 10)])
def test_tokens_are_rounded_up_to_blocks(tokens: int, blocks: int) -> None:
    assert BlockAllocator(8, block_tokens=16).blocks_for(tokens) == blocks


@pytest.mark.parametrize("owned", [[[0], [0, 1, 2, 3]], [[0, 1]], [[0, 1, 2, 3, 4]]])
def test_the_integrity_check_finds_shared_lost_and_foreign_blocks(owned: list[list[int]]) -> None:
    allocator = BlockAllocator(4, block_tokens=16)
    allocator.allocate(4)
    with pytest.raises(AssertionError, match="lost, or has two owners"):
        allocator.check_integrity(owned)
