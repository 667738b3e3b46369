"""What the compiled forward that a thread runs attends to. Compiled code cannot pass it on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from gridsieve.services.generation.model.attention.cache import Batch
from gridsieve.services.generation.model.states import StateBatch


class _Running(threading.local):
    batch: Batch
    states: StateBatch | None


RUNNING = _Running()


@contextmanager
def running(batch: Batch, states: StateBatch | None) -> Iterator[None]:
    """Forwards of this thread that are called without them attend to this batch and use these states."""
    RUNNING.batch, RUNNING.states = batch, states
    try:
        yield
    finally:
        del RUNNING.batch, RUNNING.states
