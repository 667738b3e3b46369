"""What a request comes to while it runs: tokens, frames, bytes, added up for the one line that tells of its end.

It knows neither logs nor traces, and holds numbers alone: no text ever gets into either by this way.
"""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from typing import TypeAlias

RequestStats: TypeAlias = Counter[str]

_RUNNING: ContextVar[RequestStats | None] = ContextVar("tally", default=None)


def begin_request_stats() -> RequestStats:
    """That of the request whose task this is, and of the tasks that it starts."""
    begun: RequestStats = Counter()
    _RUNNING.set(begun)
    return begun


def add_request_stats(**sizes: int) -> None:
    """Adds to the running request's. In the event loop's thread; outside of requests it does nothing."""
    if (running := _RUNNING.get()) is not None:
        running.update(sizes)
