"""The block allocator of the paged KV cache: reference counts, and an index of full blocks by their content.

    request's tokens:  [0 ............ 15][16 ........... 31][32 .. 37]
    block table:              7                  2               5        block_tokens = 16
    rows of the cache:    112 … 127           32 … 47         80 … 85
    cached as:         (root, "0 … 15") ◀─ (serial of 7, "16 … 31")       block 5 is not full

A full block is cached under its content and the serial of the block before it. Lookups compare the whole content, never
a hash alone. A cached block without references keeps its content until an allocation needs it; the block that lost its
last reference first is evicted first. A request drops the reference to its last block first, so a block is never
evicted before the blocks that follow it.

The allocator knows nothing of the cache's tensors.
Sources: PagedAttention, arXiv 2309.06180; RadixAttention, arXiv 2312.07104 (prefixes that outlive their request).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

# The parent of the first block of a sequence that is computed without an adapter, for a prompt without a cache salt.
ROOT = 0


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A full block whose content can be looked up.

    serial: identifies this content until it is evicted; never used again for another.
    parent: serial of the block before it. For the first block of a sequence: `Holding.root`.
    content: everything that its keys and values depend on besides the blocks before it.
    owners: objects that must stay alive as long as the block is cached.
    """

    block: int
    serial: int
    parent: int
    content: bytes
    owners: tuple[object, ...]


class BlockAllocator:
    """Hands out `total` blocks of `block_tokens` tokens each."""

    def __init__(self, total: int, block_tokens: int) -> None:
        self.total = total
        self.block_tokens = block_tokens
        # Taken from the end, lowest number first: a single request gets neighbouring blocks, read as one slice.
        self._empty = list(range(total - 1, -1, -1))
        self._references = [0] * total
        self._cached: dict[int, CachedBlock] = {}
        self._by_content: dict[tuple[int, bytes], CachedBlock] = {}
        self._idle: dict[int, None] = {}  # cached blocks without references, in the order of eviction
        self._serials = count(ROOT + 1)

    @property
    def free(self) -> int:
        """Blocks without references, cached or empty."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def idle(self) -> int:
        """Cached blocks without references."""
        return len(self._idle)

    def exclusive(self, blocks: Sequence[int]) -> int:
        """How many of a request's blocks no other request references: they become free when it drops them."""
        return sum(self._references[block] == 1 for block in blocks)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` blocks with one reference each, lowest number first; `count` must not exceed `free`."""
        assert count <= self.free, f"{count} blocks wanted, {self.free} are free"
        if not count:
            return []
        while len(self._empty) < count:
            self._evict(next(iter(self._idle)))
        blocks = sorted(self._empty[-count:])
        del self._empty[-count:]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def incref(self, blocks: Sequence[int]) -> None:
        """Adds a reference to each of these cached blocks."""
        for block in blocks:
            assert block in self._cached, f"block {block} is not cached"
            self._references[block] += 1
            self._idle.pop(block, None)

    def decref(self, blocks: Sequence[int]) -> None:
        """Drops a reference to each of a request's blocks, which are given in the order of its tokens."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._cached:
                self._idle[block] = None
            else:
                self._empty.append(block)

    def lookup(self, parent: int, content: bytes) -> CachedBlock | None:
        """The cached block of this content that follows the block with serial `parent`."""
        return self._by_content.get((parent, content))

    def serial_of(self, block: int) -> int:
        return self._cached[block].serial

    def cache(self, block: int, parent: int, content: bytes, owners: tuple[object, ...]) -> int:
        """Makes a full, referenced block available to lookups, and returns the serial for the block after it.

        If another block is cached with the same parent and content, that block stays, this one is not cached, and the
        returned serial is the other block's.
        """
        assert self._references[block], f"block {block} is free"
        assert block not in self._cached, f"block {block} is cached already"
        cached = self._by_content.get((parent, content))
        if cached is None:
            cached = CachedBlock(block, next(self._serials), parent, content, owners)
            self._by_content[parent, content] = self._cached[block] = cached
        return cached.serial

    def _evict(self, block: int) -> None:
        cached = self._cached.pop(block)
        del self._by_content[cached.parent, cached.content]
        del self._idle[block]
        self._empty.append(block)

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Asserts that reference counts match `owned`, the block tables of all requests, and that no block is lost."""
        references = [0] * self.total
        for blocks in owned:
            assert len(set(blocks)) == len(blocks), "a request has the same block twice"
            for block in blocks:
                references[block] += 1
        assert references == self._references, "reference counts differ from the block tables of requests"
        unreferenced = sorted(block for block, number in enumerate(references) if not number)
        assert sorted([*self._empty, *self._idle]) == unreferenced, "a free block is lost or listed twice"
        assert self._idle.keys() <= self._cached.keys(), "an idle block is not cached"
        assert not set(self._empty) & self._cached.keys(), "an empty block is cached"
        assert {cached.block for cached in self._by_content.values()} == self._cached.keys()
