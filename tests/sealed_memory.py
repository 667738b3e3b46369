"""Memory that one process of this host hands to another: sealed, as it must be, and not sealed."""

from __future__ import annotations

from gridsieve.common.sealed_memory import SealedMemory, sealed


def memory_of(content: bytes) -> SealedMemory:
    return SealedMemory(sealed(memoryview(content)))


def unsealed(content: bytes) -> SealedMemory:
    memory = SealedMemory()
    memory.write(memoryview(content))
    return memory
