"""What a request need not compute, because the cache holds it already.

    pruned prompt:   [text][0 3 4 7 · · ·][text of this question]
    blocks:          |  A  |  B  |  C  |  D  |          A, B, C: remembered from another question, shared, not copied
    media rows in D: from the answer's last rows        so nothing is selected, decoded or encoded

A block's content is what its keys and values depend on: token ids, or an answer's id and row; and positions, which need
no argument of their own this way. Blocks before it are part of its name, and so is the adapter that computed them all:
it is what the first one stands behind. It knows neither torch nor the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from services.generation.kv_cache.blocks import BlockAllocator
from services.generation.request.encoded_media import Answer
from services.generation.request.request import Request
from services.generation.request.rope import RopeState


class Prefixes:
    """Finds requests' beginnings in the blocks of an allocator, and remembers them there."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._allocator = allocator

    def reuse(self, request: Request) -> None:
        """Takes over remembered blocks in place of those yet to be filled; leaves one token to compute."""
        size = self._allocator.block_tokens
        blocks, chain, end = list[int](), request.chain, request.chained * size
        while end + size <= min(request.ready_tokens, request.tokens - 1):
            known = self._allocator.find(chain, request.content(end, end + size))
            if known is None:
                break
            blocks.append(known.block)
            chain, end = known.serial, end + size
        if end <= request.computed:
            return
        for block in blocks:
            self._allocator.hold(block)
        self._allocator.release(request.blocks[request.chained :])
        request.blocks[request.chained :] = blocks
        if not (request.prefill_announced or request.reclaimed):  # else it may have computed them itself
            request.cached_tokens += end - request.computed
        request.chain, request.chained, request.computed = chain, len(request.blocks), end

    def remember(self, request: Request) -> None:
        """Notes the blocks that the request has filled since."""
        size = self._allocator.block_tokens
        while (request.chained + 1) * size <= request.computed:
            first = request.chained * size
            content, answers = request.content(first, first + size), request.answers_within(first, first + size)
            request.chain = self._allocator.remember(request.blocks[request.chained], request.chain, content, answers)
            request.chained += 1

    def recall(self, request: Request, answers: Sequence[Answer]) -> tuple[int, list[int]]:
        """How many of a request's first media items need not come again, and the blocks that this rests on.

        answers: those that are known, of its first items.
        """
        rope = RopeState(request.plan, request.kept_counts)
        for index, answer in enumerate(answers):
            rope.deliver(index, answer.kept, answer.id)
        blocks = self._known_blocks(rope, request.root)
        items = end = 0
        for index, answer in enumerate(answers):
            rows_end = rope.rows_end(index, request.kept_counts[index] - answer.last_rows.shape[1])
            if rows_end > len(blocks) * self._allocator.block_tokens:
                break
            items, end = index + 1, max(end, rows_end)
        return items, blocks[: self._allocator.blocks_for(end)]

    def _known_blocks(self, rope: RopeState, chain: int) -> list[int]:
        size = self._allocator.block_tokens
        blocks: list[int] = []
        for first in range(0, min(rope.ready, rope.tokens - 1) - size + 1, size):
            known = self._allocator.find(chain, rope.content(first, first + size))
            if known is None:
                break
            chain = known.serial
            blocks.append(known.block)
        return blocks
