"""The blocks of the KV cache and the slots of recurrent states, and who holds them: requests, and live sessions.

    blocks      | pinned by requests | of requests | of leases | cached, nobody's | empty |
                                     └── shared: `total − live_blocks` at least ──┘

A request that reuses media rows without having received them cannot recompute them, so these blocks are pinned until it
ends. Blocks are pinned only while the largest request fits beside all pinned blocks, so the oldest request can always
run; a larger request that arrives later waits until the pins are released.

Live sessions lease all their blocks from their opening to their end, at most `live_blocks` together. Their requests
borrow them.

Models with recurrent states need a slot for the state of each request, and one for each chunk, which writes the state
after it; further slots keep the states after media and prompts, so that other requests begin there. Each running
request has two slots in any case: pins and leases take only what is left. A lease has one slot more, for the state
after the session's rows. Its request begins with this state, and replaces it if rows of the request stay.

`Memory` alone changes what a request holds; the scheduler decides when. It knows neither requests nor the model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from itertools import chain

from gridsieve.common.contract.errors import Overloaded
from gridsieve.services.generation.memory.blocks import BlockAllocator
from gridsieve.services.generation.memory.held_states import drop
from gridsieve.services.generation.memory.holder import Holder, Rows
from gridsieve.services.generation.memory.lease import Lease
from gridsieve.services.generation.memory.prefixes import PrefixCache
from gridsieve.services.generation.memory.state_slots import NO_STATE, StateSlots


class Memory:
    """max_num_seqs: requests that run at a time. live_blocks: the most that leases may have.

    states: slots of recurrent states, at least 2 · max_num_seqs; None for models without any.
    """

    def __init__(
        self, allocator: BlockAllocator, max_num_seqs: int, states: StateSlots | None = None, live_blocks: int = 0
    ) -> None:
        assert states is None or states.total >= 2 * max_num_seqs
        self.allocator = allocator
        self.states = states
        self.leases: list[Lease] = []  # opened or claimed
        self._prefixes = PrefixCache(allocator, states)
        self._max_num_seqs = max_num_seqs
        self._live_blocks = live_blocks
        self._holders: dict[Holder, None] = {}  # from `begin` to `end`
        self._pins: Counter[int] = Counter()  # how many requests have pinned each block

    # --- blocks ------------------------------------------------------------------------------------------------

    @property
    def block_tokens(self) -> int:
        return self.allocator.block_tokens

    @property
    def free(self) -> int:
        """Blocks that can be taken at once."""
        return self.allocator.free

    @property
    def shared_blocks(self) -> int:
        """Those that leases leave in any case."""
        return self.allocator.total - self._live_blocks

    def capacity_tokens(self, holder: Holder) -> int:
        """The most tokens that a request can ever have."""
        return holder.holding.capacity(self.shared_blocks) * self.block_tokens

    def missing(self, holder: Holder, tokens: int) -> int:
        """Blocks that a request must take to have so many tokens."""
        return max(0, self.allocator.blocks_for(tokens) - len(holder.holding.blocks))

    def left(self, running: Sequence[Holder], others: Iterable[Holder]) -> int:
        """Blocks that running requests leave. others: requests that may lose theirs."""
        promised = sum(self.missing(each, each.tokens) for each in running)
        lost = sum(self.allocator.exclusive(each.holding.losable) for each in others)
        # One block for each running request to grow into: otherwise its next token would preempt what is admitted.
        growing = sum(each.holding.grows for each in running)
        return self.free + lost - promised - growing

    # --- what a request holds, from its beginning to its end -----------------------------------------------------

    def begin(self, holder: Holder) -> None:
        """Admits a request, whose `max_tokens` must be within its `capacity_tokens`."""
        assert holder.max_tokens <= self.capacity_tokens(holder), f"{holder} can never fit"
        holder.holding.begin(self.states)
        self._holders[holder] = None

    def pin_media(self, holder: Holder, prompt: Rows, ready: int, ends: Sequence[int]) -> int:
        """Pins the cached blocks with the rows of the first media items. Returns how many items need not be sent.

        holder: has nothing yet. prompt: its prompt once these items are delivered, of which `ready` tokens are known.
        ends: for each item the end of the rows that must be cached.
        """
        items, found = self._prefixes.lookup_media(prompt, min(ready, prompt.tokens - 1), holder.holding.root, ends)
        blocks = [each.block for each in found]
        state = self.states.snapshot(found[-1].serial) if self.states and found else NO_STATE
        assert state is not None
        if not items or not self._can_pin(blocks, state):
            return 0
        self._pin(holder, blocks, state)
        return items

    def pin_as(self, holder: Holder, other: Holder) -> None:
        """Pins what another request with the same prompt has pinned."""
        pinned = other.holding
        self._pin(holder, pinned.blocks[: pinned.num_pinned_blocks], pinned.states.pinned)

    def reuse(self, holder: Holder) -> None:
        """Takes cached blocks for what the request has yet to compute."""
        self._prefixes.reuse(holder)

    def grow(self, holder: Holder, tokens: int) -> None:
        """Takes the blocks that are missing for so many tokens, which must be `free`."""
        holder.holding.blocks += self.allocator.allocate(self.missing(holder, tokens))

    def mark_computed(self, holder: Holder, tokens: int, places: Container[int]) -> None:
        """Records that the first `tokens` are in the KV cache.

        With recurrent states, only if the step wrote the state after them: else they are computed again.
        places: tokens after which the states that were written become snapshots.
        """
        holding = holder.holding
        if self.states is None or holding.states.take(self.states, tokens, places):
            holding.num_computed_tokens = tokens
            self._prefixes.cache_full_blocks(holder)

    def reclaim(self, holder: Holder) -> None:
        """Takes all from a request but what it has pinned."""
        holder.holding.reclaimed = True
        holder.holding.release(self.allocator, self.states)

    def end(self, holder: Holder) -> None:
        """Takes all from a request."""
        holding = holder.holding
        if holding.grows:
            self._pins -= Counter(holding.blocks[: holding.num_pinned_blocks])
        holding.end(self.allocator, self.states, holder.output_ids)
        del self._holders[holder]

    def _pin(self, holder: Holder, blocks: Sequence[int], state: int) -> None:
        holder.holding.pin(self.allocator, self.states, blocks, state)
        self._pins.update(blocks)

    def _can_pin(self, blocks: Sequence[int], state: int) -> bool:
        """Whether every request still fits beside all pinned blocks, and its states beside all pinned ones."""
        if not self._states_suffice(len(self.leases), self._pinned_states(state)):
            return False
        pinned = len(self._pins.keys() | set(blocks))
        growing = (each for each in self._holders if each.holding.grows)
        return all(pinned + self.allocator.blocks_for(each.max_tokens) <= self.shared_blocks for each in growing)

    # --- leases ------------------------------------------------------------------------------------------------

    def claim(self, lease: Lease) -> None:
        """Admits a lease. Raises Overloaded if leases may not have so many more blocks, or no state is left for it."""
        claimed, size = sum(each.num_blocks for each in self.leases), self.block_tokens
        if claimed + lease.num_blocks > self._live_blocks:
            raise Overloaded(
                f"{len(self.leases)} live sessions have {claimed * size} tokens of the KV cache, "
                f"{lease.num_blocks * size} more would exceed --live-tokens {self._live_blocks * size}"
            )
        pinned_states = self._pinned_states()
        if not self._states_suffice(len(self.leases) + 1, pinned_states):
            raise Overloaded(
                f"{len(self.leases)} live sessions and {len(pinned_states)} cached prefixes have all the recurrent "
                f"states that running requests leave (--state-slots)"
            )
        self.leases.append(lease)

    def open(self, lease: Lease) -> None:
        """Gives a lease that was admitted its blocks, which must be `free`."""
        lease.blocks = self.allocator.allocate(lease.num_blocks)

    def close(self, lease: Lease) -> None:
        """Ends a lease, opened or not, of which no request borrows."""
        if lease not in self.leases:
            return
        self.leases.remove(lease)
        self.allocator.decref(lease.blocks)
        lease.blocks = []
        if self.states:
            self.states.decref(lease.state)
            lease.state = NO_STATE

    # --- recurrent states ----------------------------------------------------------------------------------------

    def lacks_states(self, count: int) -> bool:
        """Whether fewer slots than `count` are free, of a model with recurrent states."""
        return self.states is not None and self.states.free < count

    def write_states(self, ends: Sequence[tuple[Holder, int]]) -> None:
        """Takes the slot that each chunk writes. ends: of the chunks of a step, with their requests."""
        if self.states is None:
            return
        if self.lacks_states(len(ends)):
            for holder in self._holders:
                drop(self.states, holder.holding.states.saved)
        for holder, end in ends:
            assert not holder.holding.states.next, f"{holder} has a step that was not recorded"
            holder.holding.states.write(self.states, end)

    def save_states(self, holder: Holder, places: Iterable[int]) -> None:
        """Takes further slots for the states within a chunk, after the tokens `places`, as long as slots are free."""
        for tokens in places:
            if self.states and self.states.free:
                holder.holding.states.write(self.states, tokens)

    def shorten_step(self, holder: Holder, end: int) -> None:
        """Records that the chunk of a request ends earlier, with fewer draft tokens."""
        if self.states:
            holder.holding.states.shorten(self.states, end)

    def drop_step(self, holder: Holder) -> None:
        """Records that the draft tokens that are left of a request's chunk are not part of its answer."""
        if self.states:
            drop(self.states, holder.holding.states.next)

    def _pinned_states(self, state: int = NO_STATE) -> set[int]:
        """Those at the end of the pinned blocks of requests, and one more."""
        return {state, *(each.holding.states.pinned for each in self._holders)} - {NO_STATE}

    def _states_suffice(self, leases: int, pinned_states: set[int]) -> bool:
        """Whether all running requests have two beside those of leases and the pinned ones."""
        needed = 2 * self._max_num_seqs + leases + len(pinned_states)
        return self.states is None or needed <= self.states.total

    # -------------------------------------------------------------------------------------------------------------

    def check_integrity(self, holders: Iterable[Holder], max_draft_tokens: int) -> None:
        """Asserts that no block is lost or miscounted, and that each request has the blocks it needs and no more.

        holders: all requests that have not ended. max_draft_tokens: tokens beyond its own that a request may have.
        """
        assert set(holders) == self._holders.keys(), "requests differ from those that hold memory"
        growing = [each.holding for each in self._holders if each.holding.grows]
        leased = (each.blocks for each in self.leases)
        self.allocator.check_integrity(chain((each.blocks for each in growing), leased))
        for each in self._holders:
            fewest = self.allocator.blocks_for(each.holding.num_computed_tokens)
            most = self.allocator.blocks_for(each.tokens + max_draft_tokens)
            each.holding.check_integrity(fewest, most)
        pinned = Counter(chain.from_iterable(each.blocks[: each.num_pinned_blocks] for each in growing))
        assert pinned == self._pins, "pins differ from the pinned blocks of requests"
        if self.states:
            held = chain.from_iterable(each.holding.states.slots for each in self._holders)
            self.states.check_integrity(chain(held, (each.state for each in self.leases)))
