"""Whether a call yields to others (`Prompt.yields`), and lines in which those that yield stand behind the others.

A call says it once; what waits on its behalf, in this task and those that it starts, then knows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from itertools import takewhile
from typing import TypeVar

T = TypeVar("T")

_yields: ContextVar[bool] = ContextVar("yields", default=False)


def begin_call(yields: bool) -> None:
    """Says whether the running call yields."""
    _yields.set(yields)


def call_yields() -> bool:
    """Whether the running call yields; False outside calls."""
    return _yields.get()


def join_line(line: deque[T], new: T, yields: Callable[[T], bool]) -> None:
    """Puts what is new at the end of a line, or before those that yield, if it does not."""
    behind = 0 if yields(new) else sum(1 for _ in takewhile(yields, reversed(line)))
    line.insert(len(line) - behind, new)
