"""Which blocks of the paged cache are free, who holds the others, and what full ones are remembered by.

It counts blocks and knows neither what they hold nor torch.

    request's tokens:  [0 ............ 15][16 ........... 31][32 .. 37]
    its blocks:               7                  2               5        block_tokens = 16
    slots in the cache:   112 … 127           32 … 47         80 … 85
    remembered:        (root, "0 … 15") ◀─ (serial of 7, "16 … 31")       block 5 is not full

A full block is found again by what it holds and by the block before it, compared as a whole and never by a hash alone.
Once nobody holds it, it stays until its room is needed: the one that was let go first is forgotten first. A request
lets go of its last block first, so no block is forgotten before those that follow it.
Sources: PagedAttention, arXiv 2309.06180; RadixAttention, arXiv 2312.07104 (prefixes that outlive their request).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count

from services.generation.request.adapter import ROOT


@dataclass(frozen=True, slots=True)
class Known:
    """A full block that is remembered.

    serial: names it as long as it is remembered, and nothing else ever.
    parent: serial of the block before it, or what its sequence begins behind: ROOT, or a number below it.
    content: what its keys and values depend on besides those before it.
    owners: what must live as long as this is remembered.
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
        # Handed out from the end, lowest first: a request alone gets neighbours, and its cache reads as one slice.
        self._empty = list(range(total - 1, -1, -1))
        self._holders = [0] * total
        self._known: dict[int, Known] = {}
        self._by_content: dict[tuple[int, bytes], Known] = {}
        self._idle: dict[int, None] = {}  # remembered and held by nobody, in the order in which they are forgotten
        self._serials = count(ROOT + 1)

    @property
    def free(self) -> int:
        """Blocks that nobody holds, those that are remembered among them."""
        return len(self._empty) + len(self._idle)

    @property
    def used(self) -> int:
        return self.total - self.free

    @property
    def idle(self) -> int:
        """Blocks that are remembered and that nobody holds."""
        return len(self._idle)

    def held_alone(self, blocks: Sequence[int]) -> int:
        """How many of a request's blocks nobody else holds, which would be free without it."""
        return sum(self._holders[block] == 1 for block in blocks)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks that nobody holds, lowest first. The caller has looked at `free` first."""
        assert count <= self.free, f"{count} blocks wanted, {self.free} are free"
        if not count:
            return []
        while len(self._empty) < count:
            self._forget(next(iter(self._idle)))
        blocks = sorted(self._empty[-count:])
        del self._empty[-count:]
        for block in blocks:
            self._holders[block] = 1
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Lets go of a request's blocks, given in the order of its tokens."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block]:
                continue
            if block in self._known:
                self._idle[block] = None
            else:
                self._empty.append(block)

    # --- prefixes ----------------------------------------------------------------------------------------------

    def find(self, parent: int, content: bytes) -> Known | None:
        """The block that holds `content` behind the block `parent`, if it is remembered."""
        return self._by_content.get((parent, content))

    def serial_of(self, block: int) -> int:
        return self._known[block].serial

    def hold(self, block: int) -> None:
        """One more request holds a remembered block."""
        assert block in self._known, f"block {block} is not remembered"
        self._holders[block] += 1
        self._idle.pop(block, None)

    def remember(self, block: int, parent: int, content: bytes, owners: tuple[object, ...]) -> int:
        """Notes what a full block that somebody holds contains, and returns the serial by which the next one goes on.

        Where another block with the same content is known already, that one stays and this one remains unknown.
        """
        assert self._holders[block], f"block {block} is free"
        assert block not in self._known, f"block {block} is known already"
        known = self._by_content.get((parent, content))
        if known is None:
            known = Known(block, next(self._serials), parent, content, owners)
            self._by_content[parent, content] = self._known[block] = known
        return known.serial

    def _forget(self, block: int) -> None:
        known = self._known.pop(block)
        del self._by_content[known.parent, known.content]
        del self._idle[block]
        self._empty.append(block)

    def check_integrity(self, owned: Iterable[Sequence[int]]) -> None:
        """Asserts that blocks are empty, idle or held, by as many as are counted; `owned` are all requests' lists."""
        holders = [0] * self.total
        for blocks in owned:
            assert len(set(blocks)) == len(blocks), "a request holds a block twice"
            for block in blocks:
                holders[block] += 1
        assert holders == self._holders, "a block was lost, or has another number of holders than it counts"
        nobody = sorted(block for block, number in enumerate(holders) if not number)
        assert sorted([*self._empty, *self._idle]) == nobody, "a block that nobody holds is lost, or is there twice"
        assert self._idle.keys() <= self._known.keys(), "an idle block is not remembered"
        assert not set(self._empty) & self._known.keys(), "an empty block is remembered"
        assert {known.block for known in self._by_content.values()} == self._known.keys()
