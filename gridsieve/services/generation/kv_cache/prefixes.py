"""The prefix cache: finds the beginning of a prompt among cached blocks, so that it is not computed again.

    pruned prompt:   [text][0 3 4 7 · · ·][text of this question]
    blocks:          |  A  |  B  |  C  |  D  |      A, B, C: computed for another question, shared by reference
    media rows in D: `EncodedMedia.last_rows`       so the item is neither decoded nor encoded again

Models with recurrent states need the state at the end of what is found, too: as many blocks are used as end at the last
snapshot (`state_slots.py`), and the tokens after it are computed again.

The content of a block is everything its keys and values depend on: token ids, or id of encoded media and token of its
grid, and positions. The blocks before it are part of its identity through the parent's serial, and so are the adapter
and the cache salt: they are the parent of the first block. This module knows neither torch nor the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from gridsieve.services.generation.kv_cache.blocks import BlockAllocator, CachedBlock
from gridsieve.services.generation.kv_cache.state_slots import StateSlots
from gridsieve.services.generation.request.encoded_media import EncodedMedia
from gridsieve.services.generation.request.pruned_prompt import PrunedPrompt
from gridsieve.services.generation.request.request import Request


class PrefixCache:
    """Looks prompts up in the blocks of an allocator, and caches full blocks there.

    states: the slots of recurrent states; None for models without any.
    """

    def __init__(self, allocator: BlockAllocator, states: StateSlots | None = None) -> None:
        self._allocator = allocator
        self._states = states

    def reuse(self, request: Request) -> None:
        """Replaces blocks that the request has yet to fill by cached ones. At least one token is left to compute."""
        first, size = request.num_cached_blocks, self._allocator.block_tokens
        ready = min(request.early_tokens, request.tokens - 1)
        found = self._lookup(request, ready, first, request.parent_serial)
        request.shared_tokens = max(request.shared_tokens, (first + len(found)) * size)
        found = found[: self._ends_with_state(found)]
        end = (first + len(found)) * size
        if not found or end <= request.num_computed_tokens:
            return
        blocks, serial = [each.block for each in found], found[-1].serial
        if self._states:
            slot = self._states.snapshot(serial)
            assert slot is not None
            self._states.incref(slot)
            self._states.decref(request.state)
            request.state = slot
        self._allocator.incref(blocks)
        self._allocator.decref(request.blocks[first:])
        request.blocks[first:] = blocks
        # A request whose prefill had started, or whose blocks were reclaimed, may have computed these blocks itself.
        if not (request.prefill_announced or request.reclaimed):
            request.cached_tokens += end - request.num_computed_tokens
        request.num_cached_blocks, request.parent_serial = first + len(found), serial
        request.num_computed_tokens = end

    def cache_full_blocks(self, request: Request) -> None:
        """Caches the blocks that the request has filled since the last call."""
        size = self._allocator.block_tokens
        if (request.num_cached_blocks + 1) * size > request.num_computed_tokens:
            return
        known = min(request.num_computed_tokens, request.ready_tokens)
        while (request.num_cached_blocks + 1) * size <= known:
            index = request.num_cached_blocks
            first, end = index * size, (index + 1) * size
            request.parent_serial = self._allocator.cache(
                request.blocks[index],
                request.parent_serial,
                request.content(first, end),
                request.encoded_media_within(first, end),
            )
            request.num_cached_blocks += 1
            if self._states and request.saved_states and request.saved_states[0][0] == end:
                self._keep(self._states, request, end)

    def _keep(self, states: StateSlots, request: Request, tokens: int) -> None:
        """Makes a saved state a snapshot. Of an answer the last one is kept, for the next turn of a chat."""
        _, slot = request.saved_states.pop(0)
        if tokens > request.prompt.tokens:
            states.forget(request.answer_serial)
            request.answer_serial = request.parent_serial
        states.keep(request.parent_serial, slot)
        states.decref(slot)

    def lookup_media(self, request: Request, encoded_media: Sequence[EncodedMedia]) -> tuple[int, list[CachedBlock]]:
        """How many of the first media items need not be sent again, and the cached blocks that hold their rows.

        encoded_media: what is still known of the request's first items. With recurrent states, there is a snapshot at
        the end of the blocks.
        """
        prompt = request.prompt.undelivered()
        for index, encoded in enumerate(encoded_media):
            prompt.deliver(index, encoded.kept, encoded.id)
        found = self._lookup(prompt, min(prompt.ready, prompt.tokens - 1), 0, request.root)
        found = found[: self._ends_with_state(found)]
        items = end = 0
        for index, encoded in enumerate(encoded_media):
            assert encoded.last_rows is not None
            rows_end = prompt.rows_end(index, prompt.num_kept[index] - encoded.last_rows.shape[1])
            if rows_end > len(found) * self._allocator.block_tokens:
                break
            items, end = index + 1, max(end, rows_end)
        least = self._allocator.blocks_for(end)
        while self._states and least and self._states.snapshot(found[least - 1].serial) is None:
            least += 1
        return items, found[:least]

    def _ends_with_state(self, found: Sequence[CachedBlock]) -> int:
        """How many of the first blocks can be used: all, or with recurrent states as many as end at a snapshot."""
        if self._states is None:
            return len(found)
        return next((n for n in range(len(found), 0, -1) if self._states.snapshot(found[n - 1].serial) is not None), 0)

    def _lookup(
        self, sequence: Request | PrunedPrompt, tokens: int, first_block: int, serial: int
    ) -> list[CachedBlock]:
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
