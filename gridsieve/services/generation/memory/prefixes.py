"""The prefix cache: finds the beginning of a prompt among cached blocks, so that it is not computed again.

    pruned prompt:   [text][0 3 4 7 · · ·][text of this question]
    blocks:          |  A  |  B  |  C  |  D  |      A, B, C: computed for another question, shared by reference
    media rows in D: `EncodedMedia.last_rows`       so the item is neither decoded nor encoded again

Models with recurrent states need the state at the end of what is found, too: as many blocks are used as end at the last
snapshot (`state_slots.py`), and the tokens after it are computed again.

The content of a block is everything its keys and values depend on: token ids, or id of encoded media and token of its
grid, and positions. The blocks before it are part of its identity through the parent's serial, and so are the adapter
and the cache salt: they are the parent of the first block. This module knows neither requests nor the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from gridsieve.services.generation.memory.blocks import BlockAllocator, CachedBlock
from gridsieve.services.generation.memory.holder import Holder, Rows
from gridsieve.services.generation.memory.state_slots import StateSlots


class PrefixCache:
    """Looks sequences up in the blocks of an allocator, and caches full blocks there.

    states: the slots of recurrent states; None for models without any.
    """

    def __init__(self, allocator: BlockAllocator, states: StateSlots | None = None) -> None:
        self._allocator = allocator
        self._states = states

    def reuse(self, holder: Holder) -> None:
        """Replaces blocks that the request has yet to fill by cached ones."""
        holding, size = holder.holding, self._allocator.block_tokens
        first = holding.num_cached_blocks
        found = self._lookup(holder, holder.reusable_tokens, first, holding.parent_serial)
        holding.shared_tokens = max(holding.shared_tokens, (first + len(found)) * size)
        found = found[: self._ends_with_state(found)]
        end = (first + len(found)) * size
        if not found or end <= holding.num_computed_tokens:
            return
        blocks, serial = [each.block for each in found], found[-1].serial
        if self._states:
            slot = self._states.snapshot(serial)
            assert slot is not None
            holding.states.begin_at(self._states, slot)
        self._allocator.incref(blocks)
        self._allocator.decref(holding.blocks[first:])
        holding.blocks[first:] = blocks
        # A request whose prefill had started, or whose blocks were reclaimed, may have computed these blocks itself.
        if not (holder.prefill_announced or holding.reclaimed):
            holding.cached_tokens += end - holding.num_computed_tokens
        holding.num_cached_blocks, holding.parent_serial = first + len(found), serial
        holding.num_computed_tokens = end

    def cache_full_blocks(self, holder: Holder) -> None:
        """Caches the blocks that the request has filled since the last call."""
        holding, size = holder.holding, self._allocator.block_tokens
        if (holding.num_cached_blocks + 1) * size > holding.num_computed_tokens:
            return
        known = min(holding.num_computed_tokens, holder.ready_tokens)
        while (holding.num_cached_blocks + 1) * size <= known:
            index = holding.num_cached_blocks
            first, end = index * size, (index + 1) * size
            holding.parent_serial = self._allocator.cache(
                holding.blocks[index],
                holding.parent_serial,
                holder.content(first, end),
                holder.encoded_media_within(first, end),
            )
            holding.num_cached_blocks += 1
            saved = holding.states.saved
            if self._states and saved and saved[0][0] == end:
                self._keep(self._states, holder, *saved.pop(0))

    def _keep(self, states: StateSlots, holder: Holder, tokens: int, slot: int) -> None:
        """Makes a saved state a snapshot. Of an answer the last one is kept, for the next turn of a chat."""
        holding = holder.holding
        if tokens > holder.prompt.tokens:
            states.forget(holding.answer_serial)
            holding.answer_serial = holding.parent_serial
        states.keep(holding.parent_serial, slot)
        states.decref(slot)

    def lookup_media(self, prompt: Rows, tokens: int, root: int, ends: Sequence[int]) -> tuple[int, list[CachedBlock]]:
        """How many of the first media items need not be sent again, and the cached blocks that hold their rows.

        prompt: as it is once these items are delivered; the first `tokens` are looked up. root: its first block's
        parent. ends: for each item the end of the rows that must be cached. With recurrent states, there is a snapshot
        at the end of the blocks.
        """
        found = self._lookup(prompt, tokens, 0, root)
        found = found[: self._ends_with_state(found)]
        items = end = 0
        for rows_end in ends:
            if rows_end > len(found) * self._allocator.block_tokens:
                break
            items, end = items + 1, max(end, rows_end)
        least = self._allocator.blocks_for(end)
        while self._states and least and self._states.snapshot(found[least - 1].serial) is None:
            least += 1
        return items, found[:least]

    def _ends_with_state(self, found: Sequence[CachedBlock]) -> int:
        """How many of the first blocks can be used: all, or with recurrent states as many as end at a snapshot."""
        if self._states is None:
            return len(found)
        return next((n for n in range(len(found), 0, -1) if self._states.snapshot(found[n - 1].serial) is not None), 0)

    def _lookup(self, sequence: Rows, tokens: int, first_block: int, serial: int) -> list[CachedBlock]:
        """The cached blocks within the first `tokens`, from `first_block` on.

        serial: of the block before `first_block`.
        """
        size = self._allocator.block_tokens
        blocks: list[CachedBlock] = []
        for first in range(first_block * size, tokens - size + 1, size):
            cached = self._allocator.lookup(serial, sequence.content(first, first + size))
            if cached is None:
                break
            blocks.append(cached)
            serial = cached.serial
        return blocks
