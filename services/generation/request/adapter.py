"""Which adapter a request is computed with, and which rows of a packed batch are."""

from __future__ import annotations

from dataclasses import dataclass

# The parent of a first block whose sequence is computed without an adapter.
ROOT = 0


@dataclass(frozen=True, slots=True)
class Adapter:
    """name: what requests call it. digest: sha256 of its config and weights, which alone its answers depend on."""

    name: str
    digest: bytes

    @property
    def root(self) -> int:
        """What stands for a block's parent where a sequence begins: below 0, and another for every other digest."""
        return -int.from_bytes(self.digest)


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Rows [start, end) of the packed batch, computed with the adapter of that digest."""

    digest: bytes
    start: int
    end: int
