"""Buckets of forwards: how much of a queue fits into one forward, which bucket holds it, and whether a replay pays.

    queue:    [a0 a1 a2 b0 | b1 c0 ...]         the first slice that does not fit, and all behind it, wait
    bucket:   [a0 a1 a2 b0 · · · ·]             the smallest that holds them by tokens, slices and windows

A CUDA graph is captured for each bucket. It knows neither towers nor devices; times are measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

# Empty sequences cost an attention kernel a little time. So a bucket holds one slice per so many tokens, and so many
# times the windows that its tokens would fill: edges of slices cut windows short.
TOKENS_PER_SLICE = 32
WINDOWS_PER_FULL_ONE = 2


@dataclass(frozen=True, slots=True)
class Size:
    """The size of slices, or of a bucket. windows: sequences of windowed attention; 0 without."""

    tokens: int
    slices: int
    windows: int

    def __add__(self, other: Size) -> Size:
        return Size(self.tokens + other.tokens, self.slices + other.slices, self.windows + other.windows)


class Eager(StrEnum):
    """Why a forward runs without a graph. TOKENS, SLICES, WINDOWS: what exceeds the largest bucket."""

    NONE_CAPTURED = "none_captured"
    TOKENS = "tokens"
    SLICES = "slices"
    WINDOWS = "windows"
    PADDING = "padding"  # the smallest bucket that holds it takes longer than a forward without a graph


@dataclass(frozen=True, slots=True)
class PackingLimit:
    """largest: what one forward may hold. size_of: the size of a slice, by the shape of its frames, (F, H, W, 3)."""

    largest: Size
    size_of: Callable[[Sequence[int]], Size]


def graph_buckets(least_tokens: int, most_tokens: int) -> tuple[int, ...]:
    """Tokens of each bucket, ascending: the least, its doubles, and the most."""
    found = []
    while least_tokens < most_tokens:
        found.append(least_tokens)
        least_tokens *= 2
    return (*found, most_tokens)


def bucket_size(tokens: int, window_tokens: int) -> Size:
    """The bucket with so many tokens. window_tokens: tokens of a full window; 0 without windowed attention."""
    windows = -(-WINDOWS_PER_FULL_ONE * tokens // window_tokens) if window_tokens else 0
    return Size(tokens, -(-tokens // TOKENS_PER_SLICE), windows)


def token_limit(tokens: int) -> Size:
    """A size that limits only tokens: each slice and each window has at least one."""
    return Size(tokens, tokens, tokens)


def excess(load: Size, limit: Size) -> Eager | None:
    """What of the load exceeds the limit first, if anything."""
    if load.tokens > limit.tokens:
        return Eager.TOKENS
    if load.slices > limit.slices:
        return Eager.SLICES
    return Eager.WINDOWS if load.windows > limit.windows else None


def fitting(queue: Iterable[Size], largest: Size) -> int:
    """How many of a queue's first slices go into one forward: as many as fit, but at least the first."""
    load, count = Size(0, 0, 0), 0
    for each in queue:
        load += each
        if count and excess(load, largest):
            break
        count += 1
    return count


def choose(load: Size, ascending: Sequence[Size]) -> Size | Eager:
    """The smallest of these buckets that holds the load, or what of it exceeds the largest bucket."""
    if not ascending:
        return Eager.NONE_CAPTURED
    found = next((each for each in ascending if not excess(load, each)), None) or excess(load, ascending[-1])
    assert found is not None
    return found


@dataclass(frozen=True, slots=True)
class Measured:
    """Times of one bucket: of its replay, and of a forward without a graph of the slices that filled it.

    The slices are equal squares, which may leave some tokens of the bucket empty; then a forward without a graph seems
    slightly cheaper than it is.
    """

    bucket: Size
    replay_s: float
    eager_s: float


def pays(load: Size, chosen: Size, ascending: Sequence[Measured]) -> bool:
    """Whether a replay of `chosen`, with its padding, takes no longer than the load without a graph.

    The time without a graph is interpolated linearly between measured buckets, and constant below the first.
    """
    replay_s = next(each.replay_s for each in ascending if each.bucket == chosen)
    return replay_s <= _eager_s(load.tokens, ascending)


def _eager_s(tokens: int, ascending: Sequence[Measured]) -> float:
    below = ascending[0]
    for each in ascending:
        if tokens <= each.bucket.tokens:
            share = (tokens - below.bucket.tokens) / max(1, each.bucket.tokens - below.bucket.tokens)
            return below.eager_s + share * (each.eager_s - below.eager_s)
        below = each
    return below.eager_s
