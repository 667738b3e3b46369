"""The memory that a live session has from its opening to its end, and what its requests hold meanwhile.

    lease     | 7 | 2 | 5 | 9 |    as many blocks as its window and its answers need, and the state after its rows
    borrowed  | 7 | 2 | 5 | 9 |    those, while a request computes a segment

It knows neither sessions nor the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gridsieve.services.generation.memory.block_table import BlockTable
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.memory.held_states import drop
from gridsieve.services.generation.memory.holding import Holding
from gridsieve.services.generation.memory.state_slots import NO_STATE, StateSlots


class Lease:
    """num_blocks: those that it is for. blocks: those that it has, none before it is opened.

    state: slot of the recurrent state after the session's rows, of models that have any.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks: list[int] = []
        self.state = NO_STATE

    def rotate(self, first: int, end: int) -> None:
        """Moves the blocks [first, end), whose rows are evicted, behind the others."""
        self.blocks = [*self.blocks[:first], *self.blocks[end:], *self.blocks[first:end]]


class Borrowed(Holding):
    """The blocks of a lease. It takes no others, loses none, and shares none with other sequences.

    held_tokens: rows of the session, with which the sequence begins. keep: told at the end how many tokens were
    computed, and the answer's; returns whether anything of them stays in the lease.
    """

    grows = False

    def __init__(self, lease: Lease, held_tokens: int, keep: Callable[[int, Sequence[int]], bool]) -> None:
        super().__init__()
        self._lease, self._keep = lease, keep
        self.num_computed_tokens = self.cached_tokens = held_tokens

    def capacity(self, shared_blocks: int) -> int:
        return len(self._lease.blocks)

    def begin(self, states: StateSlots | None) -> None:
        self.blocks = BlockTable(self._lease.blocks)
        # All are pinned, so none is taken away, and count as cached, so none is looked up or can be found.
        self.num_pinned_blocks = self.num_cached_blocks = len(self.blocks)
        if states:
            if not self.num_computed_tokens:  # the session has begun again
                states.decref(self._lease.state)
                self._lease.state = NO_STATE
            self.states.begin_at(states, self._lease.state)

    def end(self, allocator: BlockAllocator, states: StateSlots | None, output_ids: Sequence[int]) -> None:
        """Gives the blocks back to the lease, and the state if what was computed stays."""
        stays = self._keep(self.num_computed_tokens, output_ids)
        if states:
            if stays:
                self._lease.state, self.states.current = self.states.current, self._lease.state
            states.decref(self.states.current)
            drop(states, self.states.next)
            self.states.current = NO_STATE
        self.blocks = BlockTable()
        self.num_pinned_blocks = self.num_cached_blocks = 0

    def check_integrity(self, fewest_blocks: int, most_blocks: int) -> None:
        """Asserts that it has the blocks of its lease."""
        assert self.blocks == self._lease.blocks, "a request of a session has other blocks than the session"
        assert fewest_blocks <= len(self.blocks), "a request of a session lacks blocks"
