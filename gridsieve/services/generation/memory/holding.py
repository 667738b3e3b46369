"""What one request holds in the memory that all requests share: blocks of the KV cache, and slots of recurrent states.

    blocks    | pinned | cached ... | full, not cached yet | being filled |
              0        num_pinned   num_cached             num_computed_tokens

It knows neither requests nor the model. `Memory` and `PrefixCache` alone call what changes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gridsieve.services.generation.memory.block_table import BlockTable
from gridsieve.services.generation.memory.blocks import ROOT, BlockAllocator
from gridsieve.services.generation.memory.held_states import HeldStates
from gridsieve.services.generation.memory.state_slots import NO_STATE, StateSlots


class Holding:
    """Blocks that a request takes as its sequence grows, and may lose.

    root: parent of its first block: sequences of different roots share no blocks.
    num_pinned_blocks: first blocks, whose media rows only the cache has: not released before the end.
    num_computed_tokens: tokens whose keys and values are in the KV cache.
    num_cached_blocks: first blocks that are cached in the allocator, or equal to a cached block.
    parent_serial: serial of the last of these blocks.
    answer_serial: of the last block of the answer that has a snapshot.
    shared_tokens: how many first tokens had a cached block, even where no state lets the request begin after them.
    cached_tokens: prompt tokens that other requests had computed.
    reclaimed: its blocks were taken away before its request finished.
    """

    grows = True  # whether it takes blocks that other requests could have

    def __init__(self, root: int = ROOT) -> None:
        self.root = root
        self.blocks = BlockTable()
        self.states = HeldStates()
        self.num_pinned_blocks = self.num_cached_blocks = 0
        self.num_computed_tokens = self.shared_tokens = self.cached_tokens = 0
        self.parent_serial = root
        self.answer_serial = ROOT
        self.reclaimed = False

    @property
    def losable(self) -> Sequence[int]:
        """Blocks that may be taken away: all but the pinned ones."""
        return self.blocks[self.num_pinned_blocks :]

    def capacity(self, shared_blocks: int) -> int:
        """The most blocks it can ever have. shared_blocks: those that live sessions leave."""
        return shared_blocks

    def begin(self, states: StateSlots | None) -> None:
        """Takes what it begins with: nothing."""

    def pin(self, allocator: BlockAllocator, states: StateSlots | None, blocks: Sequence[int], state: int) -> None:
        """Takes the first blocks of the prompt and the state after them, which it keeps until its end.

        It must have no blocks.
        """
        if states:
            self.states.pinned = states.incref(state)
        allocator.incref(blocks)
        self.blocks, self.num_pinned_blocks = BlockTable(blocks), len(blocks)
        self.cached_tokens = len(blocks) * allocator.block_tokens
        self.release(allocator, states)  # sets the counters to the pinned blocks

    def release(self, allocator: BlockAllocator, states: StateSlots | None) -> None:
        """Drops all blocks and states but the pinned ones."""
        pinned = self.num_pinned_blocks
        allocator.decref(self.losable)
        del self.blocks[pinned:]
        self.num_computed_tokens = pinned * allocator.block_tokens
        self.num_cached_blocks = pinned
        self.parent_serial = allocator.serial_of(self.blocks[-1]) if pinned else self.root
        if states:
            self.states.release(states)

    def end(self, allocator: BlockAllocator, states: StateSlots | None, output_ids: Sequence[int]) -> None:
        """Drops everything. output_ids: of the answer, for who keeps what was computed."""
        self.num_pinned_blocks = 0
        pinned, self.states.pinned = self.states.pinned, NO_STATE
        self.release(allocator, states)
        if states:
            states.decref(pinned)

    def check_integrity(self, fewest_blocks: int, most_blocks: int) -> None:
        """Asserts that it has the blocks of its computed tokens, and none beyond its tokens."""
        assert fewest_blocks <= len(self.blocks), "a request lacks blocks"
        assert len(self.blocks) <= most_blocks, "a request has more blocks than tokens"
        assert self.num_pinned_blocks <= self.num_cached_blocks <= len(self.blocks), "pinned blocks are not cached"
