"""How large a paged cache is, whatever its layout."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """blocks: those that requests may hold. Every cache has one more, for rows that only fill a batch up."""

    layers: int
    blocks: int
    block_tokens: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def padding_block(self) -> int:
        return self.blocks
