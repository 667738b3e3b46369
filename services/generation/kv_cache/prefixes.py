"""The prefix cache: finds the beginning of a prompt among cached blocks, so that it is not computed again.

    pruned prompt:   [text][0 3 4 7 · · ·][text of this question]
    blocks:          |  A  |  B  |  C  |  D  |      A, B, C: computed for another question, shared by reference
    media rows in D: `EncodedMedia.last_rows`       so the item is neither decoded nor encoded again

The content of a block is everything its keys and values depend on: token ids, or id of encoded media and token of its
grid, and positions. The blocks before it are part of its identity through the parent's serial, and so is the adapter:
it is the parent of the first block. This module knows neither torch nor the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from framesieve.services.generation.kv_cache.blocks import BlockAllocator
from framesieve.services.generation.request.encoded_media import EncodedMedia
from framesieve.services.generation.request.pruned_prompt import PrunedPrompt
from framesieve.services.generation.request.request import Request


class PrefixCache:
    """Looks prompts up in the blocks of an allocator, and caches full blocks there."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator

    def reuse(self, request: Request) -> None:
        """Replaces blocks that the request has yet to fill by cached ones. At least one token is left to compute."""
        blocks, serial = self._lookup(
            request, min(request.ready_tokens, request.tokens - 1), request.num_cached_blocks, request.parent_serial
        )
        first = request.num_cached_blocks
        end = (first + len(blocks)) * self._allocator.block_tokens
        if end <= request.num_computed_tokens:
            return
        self._allocator.incref(blocks)
        self._allocator.decref(request.blocks[first:])
        request.blocks[first:] = blocks
        # A request whose prefill had started, or whose blocks were reclaimed, may have computed these blocks itself.
        if not (request.prefill_announced or request.reclaimed):
            request.cached_tokens += end - request.num_computed_tokens
        request.num_cached_blocks, request.parent_serial = first + len(blocks), serial
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

    def lookup_media(self, request: Request, encoded_media: Sequence[EncodedMedia]) -> tuple[int, list[int]]:
        """How many of the first media items need not be sent again, and the cached blocks that hold their rows.

        encoded_media: what is still known of the request's first items.
        """
        prompt = request.prompt.undelivered()
        for index, encoded in enumerate(encoded_media):
            prompt.deliver(index, encoded.kept, encoded.id)
        blocks, _ = self._lookup(prompt, min(prompt.ready, prompt.tokens - 1), 0, request.root)
        items = end = 0
        for index, encoded in enumerate(encoded_media):
            assert encoded.last_rows is not None
            rows_end = prompt.rows_end(index, prompt.num_kept[index] - encoded.last_rows.shape[1])
            if rows_end > len(blocks) * self._allocator.block_tokens:
                break
            items, end = index + 1, max(end, rows_end)
        return items, blocks[: self._allocator.blocks_for(end)]

    def _lookup(
        self, sequence: Request | PrunedPrompt, tokens: int, first_block: int, serial: int
    ) -> tuple[list[int], int]:
        """The cached blocks within the first `tokens`, from `first_block` on, and the serial of the last one.

        serial: of the block before `first_block`.
        """
        size = self._allocator.block_tokens
        blocks: list[int] = []
        for first in range(first_block * size, tokens - size + 1, size):
            cached = self._allocator.lookup(serial, sequence.content(first, first + size))
            if cached is None:
                break
            blocks.append(cached.block)
            serial = cached.serial
        return blocks, serial
