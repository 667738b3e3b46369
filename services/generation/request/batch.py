"""What one packed forward reads: each request's window of its pruned sequence, laid end to end.

    pruned:   [text][0 3 4 7][text]            spans: rows 0..3 of item 0 are at 4
    window:            [4 7 text]              [6, 9): rows 2..3 of item 0, then one text token
    packed:   [d][d][window of A][window of B]  decodes (windows of one token) first, so that they form a rectangle;
                                                within both parts, windows of one adapter are adjacent

It works on numpy arrays and knows neither the model nor torch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from framesieve.common.contract.plan import Int32Array
from framesieve.services.generation.request.request import Request

Int64Array: TypeAlias = NDArray[np.int64]


@dataclass(slots=True, eq=False)  # not frozen: that makes creating one four times as slow, and each step creates many
class Window:
    """Tokens [start, end) of a request's pruned sequence that one forward computes. Never changed.

    samples: the token after the window is sampled.
    draft_tokens: the last tokens of the window; a token is sampled after each of them, too.
    """

    request: Request
    start: int
    end: int
    samples: bool
    draft_tokens: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def num_draft_tokens(self) -> int:
        return len(self.draft_tokens)


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Rows [first_row, first_row + rows) of a request's media item, at packed rows [at, end)."""

    at: int
    rows: int
    request: Request
    media_index: int
    first_row: int

    @property
    def end(self) -> int:
        return self.at + self.rows


class Context(NamedTuple):
    """A window for attention: tokens [start, end) of a sequence whose first `end` tokens are in `blocks`."""

    start: int
    end: int
    blocks: Sequence[int] | Int32Array | Int64Array

    @property
    def tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Packed rows [start, end), computed with the adapter of this digest."""

    digest: bytes
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """Windows laid end to end, decodes first. It holds numbers only, so it can be sent to other processes.

    contexts: one for each window, in order.
    num_decodes: windows of one token, a prompt's last token among them.
    ids: int64 [T], the pad token for media rows.
    positions: int64 [3, T].
    slots: int64 [T], where in the cache the keys and values are written.
    media_rows: int64 [M], packed rows that take media embeddings instead of those of `ids`.
    last_rows: int64 [S], rows whose logits are needed: for each window that samples, 1 + its draft tokens.
    adapted: rows that are computed with an adapter.
    unread_rows: int64 [U], rows whose token was sampled and not read by the host; their `ids` are 0.
    """

    contexts: tuple[Context, ...]
    num_decodes: int
    ids: Int64Array
    positions: Int64Array
    slots: Int64Array
    media_rows: Int64Array
    last_rows: Int64Array
    adapted: tuple[AdaptedRows, ...] = ()
    unread_rows: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def decodes_only(self) -> bool:
        """Whether every row is text without an adapter, and sampled: answers' last tokens and their draft tokens."""
        return len(self.last_rows) == len(self.ids) and not len(self.media_rows) and not self.adapted

    @property
    def row_contexts(self) -> list[Context]:
        """A context for each row, which ends with it."""
        return [
            context if context.tokens == 1 else Context(end - 1, end, context.blocks)
            for context in self.contexts
            for end in range(context.start + 1, context.end + 1)
        ]


def decodes_first(windows: Sequence[Window]) -> list[Window]:
    """Windows in packed order. The sort is stable."""
    return sorted(windows, key=lambda window: (window.tokens > 1, window.request.root))


def pack(windows: Sequence[Window], block_tokens: int) -> tuple[Packed, tuple[MediaRows, ...]]:
    """Lays windows, which are in packed order, end to end, and lists their media rows."""
    contexts = [_context(window, block_tokens) for window in windows]
    total = sum(window.end - window.start for window in windows)
    num_decodes = next((index for index, window in enumerate(windows) if window.tokens > 1), len(windows))
    ids, positions, slots = np.empty(total, np.int64), np.empty((3, total), np.int64), np.empty(total, np.int64)
    _fill_decodes(windows[:num_decodes], ids, positions)
    starts = np.array([window.start for window in windows[:num_decodes]], np.int64)
    last_blocks = np.array([context.blocks[-1] for context in contexts[:num_decodes]], np.int64)
    slots[:num_decodes] = last_blocks * block_tokens + starts % block_tokens
    media: list[MediaRows] = []
    last_rows = [row for row, window in enumerate(windows[:num_decodes]) if window.samples]
    for row, window in enumerate(windows[:num_decodes]):
        if window.start < window.request.rope.tokens:
            media.extend(media_rows(window, row))
    at = num_decodes
    for window, context in zip(windows[num_decodes:], contexts[num_decodes:], strict=True):
        end = at + window.tokens
        _fill(window, ids[at:end], positions[:, at:end])
        slots[at:end] = slots_of(context.blocks, window.start, window.end, block_tokens)
        media.extend(media_rows(window, at))
        if window.samples:
            last_rows.extend(range(end - 1 - window.num_draft_tokens, end))
        at = end
    packed = Packed(
        contexts=tuple(contexts),
        num_decodes=num_decodes,
        ids=ids,
        positions=positions,
        slots=slots,
        media_rows=np.concatenate([np.empty(0, np.int64), *(np.arange(each.at, each.end) for each in media)]),
        unread_rows=np.array([row for row, window in enumerate(windows) if window.request.num_unread], np.int64),
        last_rows=np.array(last_rows, np.int64),
        adapted=tuple(_adapted_rows(windows)),
    )
    return packed, tuple(media)


def _adapted_rows(windows: Sequence[Window]) -> Iterator[AdaptedRows]:
    at = 0
    for adapter, same in groupby(windows, key=lambda window: window.request.adapter):
        end = at + sum(window.tokens for window in same)
        if adapter:
            yield AdaptedRows(adapter.digest, at, end)
        at = end


def slots_of(blocks: Sequence[int] | Int32Array | Int64Array, start: int, end: int, block_tokens: int) -> Int64Array:
    """Cache slots of tokens [start, end) of the sequence with this block table: int64 [end − start]."""
    tokens = np.arange(start, end)
    return np.asarray(blocks, np.int64)[tokens // block_tokens] * block_tokens + tokens % block_tokens


def media_rows(window: Window, at: int) -> Iterator[MediaRows]:
    """The media rows inside a window that starts at packed row `at`; its other rows are text."""
    spans = window.request.rope.spans
    if not spans or window.start >= spans[-1].end:
        return
    for span in spans[max(0, bisect_right(spans, window.start, key=attrgetter("offset")) - 1) :]:
        start, end = max(span.offset, window.start), min(span.end, window.end)
        if span.offset >= window.end:
            return
        if start < end:
            yield MediaRows(
                at=at + start - window.start,
                rows=end - start,
                request=window.request,
                media_index=span.media_index,
                first_row=span.first_row + start - span.offset,
            )


def _context(window: Window, block_tokens: int) -> Context:
    return Context(window.start, window.end, window.request.blocks.array[: -(-window.end // block_tokens)])


def _fill_decodes(windows: Sequence[Window], ids: Int64Array, positions: Int64Array) -> None:
    """Fills the rows of windows of one token, the first ones. The id of an unread token is 0."""
    known, places = [], []
    for window in windows:
        request, place = window.request, window.start - window.request.rope.tokens
        known.append(0 if place < 0 or request.num_unread else request.output_ids[place])
        places.append(window.start + request.rope.delta)
    ids[: len(windows)], positions[:, : len(windows)] = known, places
    for row, window in enumerate(windows):
        rope = window.request.rope
        if window.start < rope.tokens:
            ids[row], positions[:, row] = rope.ids[window.start], rope.positions[:, window.start]


def _fill(window: Window, ids: Int64Array, positions: Int64Array) -> None:
    """Fills the rows of a window, which reaches into the answer when a preempted request is recomputed."""
    request, prompt = window.request, window.request.rope.tokens
    inside = max(0, min(window.end, prompt) - window.start)
    ids[:inside] = request.rope.ids[window.start : window.start + inside]
    positions[:, :inside] = request.rope.positions[:, window.start : window.start + inside]
    if inside < window.tokens:
        first = max(window.start, prompt)
        own = [*request.output_ids[first - prompt :], *window.draft_tokens]
        ids[inside:] = own[: window.end - first]
        positions[:, inside:] = np.arange(first, window.end) + request.rope.delta
