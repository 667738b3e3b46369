"""A fake tower that runs a forward each time its gate is opened; for tests of batching and of cache entries."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from gridsieve.services.encoder.tower.graph_buckets import PackingLimit, Size, token_limit
from gridsieve.services.encoder.tower.sound import Sound

TIMEOUT_S = 10
BUG, TOO_LARGE_WITH_OTHERS, TOO_LARGE = 13, 15, 16


def limit_of(tokens: int) -> PackingLimit:
    """A forward of so many tokens of slices of a `GatedTower`."""

    def size_of(frames: Tensor | Sound) -> Size:
        _, own = _facts(frames)
        return Size(own, 1, 0, own)

    return PackingLimit(token_limit(tokens), size_of)


def _facts(frames: Tensor | Sound) -> tuple[int, int]:
    """Name and tokens of a slice or a sound."""
    values = frames.features if isinstance(frames, Sound) else frames
    name, tokens = values.reshape(-1)[:2].tolist()
    return int(name), int(tokens)


class GatedTower:
    """A slice's first value is its name, which its embeddings repeat; its second is its number of tokens.

    forwards: names of the slices of each forward. adapters: of each forward. made: tensors of forwards that ran out of
    memory. Slices with the names above make their forward fail.
    """

    def __init__(self) -> None:
        self.forwards: list[list[int]] = []
        self.adapters: list[bytes] = []
        self.made: list[weakref.ref[Tensor]] = []
        self.started = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)

    def encode(self, slices: Sequence[Tensor | Sound], adapter: bytes = b"") -> list[Tensor]:
        named = [_facts(frames) for frames in slices]
        names = [name for name, _ in named]
        self.forwards.append(names)
        self.adapters.append(adapter)
        self.started.release()
        assert self.gate.acquire(timeout=TIMEOUT_S)
        if BUG in names:
            raise RuntimeError("unlucky")
        if TOO_LARGE in names or (TOO_LARGE_WITH_OTHERS in names and len(names) > 1):
            made = torch.zeros(3)
            self.made.append(weakref.ref(made))
            raise torch.OutOfMemoryError("none is left")
        return [torch.full((1, tokens, 2), float(name)) for name, tokens in named]

    def begun(self) -> bool:
        """Waits for the next forward to begin."""
        return self.started.acquire(timeout=TIMEOUT_S)

    def open(self, times: int = 100) -> None:
        for _ in range(times):
            self.gate.release()
