"""Which blocks of the paged cache are free, and who owns the others.

It counts blocks and knows neither what they hold nor torch.

    request's tokens:  [0 ............ 15][16 ........... 31][32 .. 37]
    its blocks:               7                  2               5        block_tokens = 16
    slots in the cache:   112 … 127           32 … 47         80 … 85

Source: PagedAttention, arXiv 2309.06180.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockAllocator:
    """Hands out `total` blocks of `block_tokens` tokens each."""

    def __init__(self, total: int, block_tokens: int) -> None:
        self.total = total
        self.block_tokens = block_tokens
        # Handed out from the end, lowest first: a request alone gets neighbours, and its cache reads as one slice.
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks that nobody owns. The caller has looked at `free` first."""
        assert count <= len(self._free), f"{count} blocks wanted, {len(self._free)} are free"
        if not count:
            return []
        blocks = self._free[-count:][::-1]
        del self._free[-count:]
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        self._free.extend(reversed(blocks))

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Asserts that every block is either free or owned, once; `owned` are the block lists of all requests."""
        seen = sorted([*self._free, *(block for blocks in owned for block in blocks)])
        assert seen == list(range(self.total)), "a block was lost, or has two owners"
