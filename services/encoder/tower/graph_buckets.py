"""Budgets of forwards: what of a queue fits into one, which of the captured ones holds it, and whether that pays.

    queue:    [a0 a1 a2 b0 | b1 c0 ...]         the first that would not fit, and all behind it, wait
    budget:   [a0 a1 a2 b0 · · · ·]             the smallest that holds them by tokens, slices and windows

It knows neither towers nor devices, nor what a forward takes: times are measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

# Where a kernel is told of more sequences than there are, the empty ones cost it a little. So a budget has room for one
# slice to so many tokens, and for so many times the windows that its tokens fill: edges of slices cut windows short.
TOKENS_A_SLICE = 32
WINDOWS_A_FULL_ONE = 2


@dataclass(frozen=True, slots=True)
class Size:
    """What slices take of a budget, or what a budget has. windows: sequences of windowed attention; 0 without."""

    tokens: int
    slices: int
    windows: int

    def __add__(self, other: Size) -> Size:
        return Size(self.tokens + other.tokens, self.slices + other.slices, self.windows + other.windows)


class Eager(StrEnum):
    """Why a forward is run as it is and no graph replayed."""

    NONE_CAPTURED = "none_captured"
    TOKENS = "tokens"
    SLICES = "slices"
    WINDOWS = "windows"
    PADDING = "padding"  # the smallest graph that holds it takes longer than it does


@dataclass(frozen=True, slots=True)
class Packing:
    """How slices are packed. largest: what a forward may hold. size_of: a slice's, by the shape of its frames."""

    largest: Size
    size_of: Callable[[Sequence[int]], Size]


def budgets(least_tokens: int, most_tokens: int) -> tuple[int, ...]:
    """Tokens of each budget, ascending: the least, its doubles, and the most."""
    found = []
    while least_tokens < most_tokens:
        found.append(least_tokens)
        least_tokens *= 2
    return (*found, most_tokens)


def room_of(tokens: int, window_tokens: int) -> Size:
    """What a budget of so many tokens has room for. window_tokens: of a full window; 0 where attention has none."""
    windows = -(-WINDOWS_A_FULL_ONE * tokens // window_tokens) if window_tokens else 0
    return Size(tokens, -(-tokens // TOKENS_A_SLICE), windows)


def tokens_alone(tokens: int) -> Size:
    """A budget that only tokens count in: each slice and each window has at least one."""
    return Size(tokens, tokens, tokens)


def excess(load: Size, room: Size) -> Eager | None:
    """What there is too much of, if anything."""
    if load.tokens > room.tokens:
        return Eager.TOKENS
    if load.slices > room.slices:
        return Eager.SLICES
    return Eager.WINDOWS if load.windows > room.windows else None


def fitting(queue: Iterable[Size], largest: Size) -> int:
    """How many of a queue's first slices go into one forward: as many as fit, and the first in any case."""
    load, count = Size(0, 0, 0), 0
    for each in queue:
        load += each
        if count and excess(load, largest):
            break
        count += 1
    return count


def choose(load: Size, ascending: Sequence[Size]) -> Size | Eager:
    """The smallest of these budgets that holds a load, or why the largest does not."""
    if not ascending:
        return Eager.NONE_CAPTURED
    found = next((each for each in ascending if not excess(load, each)), None) or excess(load, ascending[-1])
    assert found is not None
    return found


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a budget: its replay, and a forward without a graph of the slices that filled it.

    These are squares: where a budget is no multiple of theirs they have fewer tokens than it, and a forward without a
    graph seems a little cheaper than it is.
    """

    budget: Size
    replay_s: float
    eager_s: float


def pays(load: Size, chosen: Size, ascending: Sequence[Measured]) -> bool:
    """Whether a replay of `chosen`, padding and all, takes no longer than the load by itself without a graph.

    What such a forward takes is read off those that were measured: on the line between two, below the first like it.
    """
    replay_s = next(each.replay_s for each in ascending if each.budget == chosen)
    return replay_s <= _eager_s(load.tokens, ascending)


def _eager_s(tokens: int, ascending: Sequence[Measured]) -> float:
    below = ascending[0]
    for each in ascending:
        if tokens <= each.budget.tokens:
            share = (tokens - below.budget.tokens) / max(1, each.budget.tokens - below.budget.tokens)
            return below.eager_s + share * (each.eager_s - below.eager_s)
        below = each
    return below.eager_s
