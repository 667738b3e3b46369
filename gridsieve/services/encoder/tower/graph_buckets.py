"""Buckets of forwards: how much of a queue fits into one forward, which bucket holds it, and whether a replay pays.

    queue:    [a0 a1 a2 b0 | b1 c0 ...]         the first slice that does not fit, and all after it, wait
    bucket:   [a0 a1 a2 b0 · · · ·]             the smallest that holds them by tokens, slices, windows and length

A CUDA graph is captured for each bucket. FlashAttention launches for each slice of a bucket as many blocks of threads
as its longest slice has tiles of rows, so slices times length is a fixed multiple of a bucket's tokens, and a number of
tokens has a bucket of many short slices and one of few long ones:

    2048 tokens (8192 patches, 64 tiles)     64 slices of up to  256 tokens ( 8 tiles)     512 blocks per head
                                              8 slices of up to 2048 tokens (64 tiles)     512 blocks per head

It knows neither towers nor devices; times are measured elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np

# Rows of a tile, for which FlashAttention launches one block of threads in each head.
TILE_ROWS = 128
# A bucket launches so many blocks for each one that its tokens fill; the others find nothing to do.
BLOCKS_PER_FULL_ONE = 8
# The longest slices of buckets, in tiles: 1024 and 8192 patches. As the second is 8 times the first, too, any number of
# equal slices of a tile or more fits into a bucket of as many tokens. Longer slices run without a graph: their forwards
# keep a device busy for longer than the host needs to launch them.
LONGEST_TILES = (8, 64)
# A bucket holds so many times the windows that its tokens would fill. Edges of slices cut windows short, and where a
# method before the tower keeps a quarter of the tokens, spread over all windows, these have a quarter of their tokens.
# Layers with windows, of a tile or less each, then launch as many blocks as those of full attention, which have
# BLOCKS_PER_FULL_ONE for each tile (windows of Qwen2.5-VL fill half a tile). Sparser slices fill a bucket by windows.
WINDOWS_PER_FULL_ONE = 4


@dataclass(frozen=True, slots=True)
class Size:
    """The size of slices, or of a bucket. windows: sequences of windowed attention; 0 without. longest: tokens of the
    longest slice."""

    tokens: int
    slices: int
    windows: int
    longest: int

    def __add__(self, other: Size) -> Size:
        return Size(
            self.tokens + other.tokens,
            self.slices + other.slices,
            self.windows + other.windows,
            max(self.longest, other.longest),
        )


NOTHING = Size(0, 0, 0, 0)


class Eager(StrEnum):
    """Why a forward runs without a graph. TOKENS, SLICES, WINDOWS: what exceeds every bucket."""

    NONE_CAPTURED = "none_captured"
    TOKENS = "tokens"
    SLICES = "slices"
    WINDOWS = "windows"
    LONGEST = "longest"  # its longest slice exceeds every bucket, or every bucket of so many slices
    PADDING = "padding"  # the smallest bucket that holds it takes longer than a forward without a graph


@dataclass(frozen=True, slots=True)
class PackingLimit:
    """largest: what one forward may hold. size_of: the size of a slice."""

    largest: Size
    size_of: Callable[[Any], Size]


def bucket_size(tokens: int, longest: int, window_tokens: int, blocks: int = BLOCKS_PER_FULL_ONE) -> Size:
    """The bucket with so many tokens, of slices of up to `longest` tokens, as many as `blocks` allows.

    window_tokens: tokens of a full window; 0 without windowed attention.
    """
    longest = min(longest, tokens)
    windows = -(-WINDOWS_PER_FULL_ONE * tokens // window_tokens) if window_tokens else 0
    return Size(tokens, -(-blocks * tokens // longest), windows, longest)


def token_limit(tokens: int) -> Size:
    """A size that limits only tokens: each slice and each window has at least one."""
    return Size(tokens, tokens, tokens, tokens)


def packing_size(buckets: Sequence[Size]) -> Size:
    """The largest forward that fits into one of these buckets; a slice may have any length."""
    tokens = max(each.tokens for each in buckets)
    return Size(tokens, max(each.slices for each in buckets), max(each.windows for each in buckets), tokens)


def excess(load: Size, limit: Size) -> Eager | None:
    """The first of tokens, slices, windows and length that exceeds the limit; None: the load fits."""
    if load.tokens > limit.tokens:
        return Eager.TOKENS
    if load.slices > limit.slices:
        return Eager.SLICES
    if load.windows > limit.windows:
        return Eager.WINDOWS
    return Eager.LONGEST if load.longest > limit.longest else None


def fitting(queue: Iterable[Size], largest: Size) -> int:
    """How many of a queue's first slices go into one forward: as many as fit, but at least the first."""
    load, count = NOTHING, 0
    for each in queue:
        load += each
        if count and excess(load, largest):
            break
        count += 1
    return count


def choose(load: Size, buckets: Sequence[Size]) -> Size | Eager:
    """The first of the smallest of these buckets that hold the load, or what of it exceeds them."""
    if not buckets:
        return Eager.NONE_CAPTURED
    holding = [each for each in buckets if not excess(load, each)]
    return (
        min(holding, key=lambda each: each.tokens) if holding else excess(load, packing_size(buckets)) or Eager.LONGEST
    )


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

    ascending: `chosen`, and the other buckets for slices of such lengths. The time without a graph is interpolated
    linearly between them, and constant below the first.
    """
    replay_s = next(each.replay_s for each in ascending if each.bucket == chosen)
    tokens, eager_s = [each.bucket.tokens for each in ascending], [each.eager_s for each in ascending]
    return bool(replay_s <= np.interp(load.tokens, tokens, eager_s))
