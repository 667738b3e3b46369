"""What a thread's compiled forward attends to and adds to its media rows, which compiled code cannot pass on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from gridsieve.services.generation.model.attention.cache import Batch
from gridsieve.services.generation.model.states import StateBatch


class _Running(threading.local):
    batch: Batch
    states: StateBatch | None
    levels: tuple[Tensor, Tensor] | None


RUNNING = _Running()


@contextmanager
def running(batch: Batch, states: StateBatch | None, levels: tuple[Tensor, Tensor] | None = None) -> Iterator[None]:
    """Forwards of this thread that are called without them attend to this batch, use these states and add these levels.

    levels: int64 [M], the indices of the media rows, and [embed_levels, M, D]; None without media rows.
    """
    RUNNING.batch, RUNNING.states, RUNNING.levels = batch, states, levels
    try:
        yield
    finally:
        del RUNNING.batch, RUNNING.states, RUNNING.levels
