"""The input of one packed forward: a chunk of each request's pruned sequence, laid end to end.

    pruned:   [text][0 3 4 7][text]           spans: rows 0..3 of item 0 are at 4
    chunk:            [4 7 text]              [6, 9): rows 2..3 of item 0, then one text token
    packed:   [d][d][chunk of A][chunk of B]  decodes (chunks of one token) first, so that they form a rectangle;
                                              within both parts, chunks of one adapter are adjacent

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

from gridsieve.common.contract.plan import Int32Array
from gridsieve.services.generation.request.request import Request

Int64Array: TypeAlias = NDArray[np.int64]


class StateUse(NamedTuple):
    """Slots of recurrent states that a chunk reads and writes: those before its first and after its last token.

    saves: (tokens, slot) for each slot that gets the state after some of its tokens, in order.
    """

    read: int
    write: int
    saves: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True, eq=False)  # not frozen: that makes creating one four times as slow, and each step creates many
class Chunk:
    """Tokens [start, end) of a request's pruned sequence that one forward computes. Never changed.

    samples: the token after the chunk is sampled.
    draft_tokens: the last tokens of the chunk; a token is sampled after each of them, too.
    drafted: whether the step waited for its drafts, though prompt lookup may have found none after all, or the answer's
        grammar may have refused them.
    """

    request: Request
    start: int
    end: int
    samples: bool
    draft_tokens: tuple[int, ...] = ()
    drafted: bool = False

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def num_draft_tokens(self) -> int:
        return len(self.draft_tokens)

    @property
    def known_end(self) -> int:
        """Of the tokens before its draft tokens."""
        return self.end - len(self.draft_tokens)


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
    """What attention reads for a chunk: tokens [start, end) attend to the first `end` tokens, which are in `blocks`."""

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
    """Chunks laid end to end, decodes first. It holds numbers only, so it can be sent to other processes.

    contexts: one for each chunk, in order.
    num_decodes: chunks of one token, a prompt's last token among them.
    ids: int64 [T], the pad token for media rows.
    positions: int64 [3, T].
    slots: int64 [T], where in the cache the keys and values are written.
    media_rows: int64 [M], packed rows that take media embeddings instead of those of `ids`.
    logit_rows: int64 [S], rows whose logits are needed: for each chunk that samples, 1 + its draft tokens.
    adapted: rows that are computed with an adapter.
    states: one for each chunk, in order; none of models without recurrent states.
    unread_rows: int64 [U], rows whose token was sampled and not read by the host; their `ids` are 0.
    """

    contexts: tuple[Context, ...]
    num_decodes: int
    ids: Int64Array
    positions: Int64Array
    slots: Int64Array
    media_rows: Int64Array
    logit_rows: Int64Array
    adapted: tuple[AdaptedRows, ...] = ()
    states: tuple[StateUse, ...] = ()
    unread_rows: Int64Array = field(default_factory=lambda: np.empty(0, np.int64))

    @property
    def decodes_only(self) -> bool:
        """Whether every row is text without an adapter, and the last row of every chunk is sampled: steps of answers'
        last tokens and their draft tokens, and of short ends of prompts."""
        if len(self.media_rows) or self.adapted or len(self.logit_rows) < len(self.contexts):
            return False
        ends = np.cumsum([context.tokens for context in self.contexts]) - 1
        return len(self.logit_rows) == len(self.ids) or bool(np.isin(ends, self.logit_rows).all())

    @property
    def row_contexts(self) -> list[Context]:
        """A context for each row, which ends with it."""
        return [
            context if context.tokens == 1 else Context(end - 1, end, context.blocks)
            for context in self.contexts
            for end in range(context.start + 1, context.end + 1)
        ]


def decodes_first(chunks: Sequence[Chunk]) -> list[Chunk]:
    """Chunks in packed order. The sort is stable."""
    return sorted(chunks, key=_order)


def _order(chunk: Chunk) -> tuple[bool, bytes]:
    adapter = chunk.request.adapter
    return chunk.tokens > 1, adapter.digest if adapter else b""


def pack(chunks: Sequence[Chunk], block_tokens: int) -> tuple[Packed, tuple[MediaRows, ...]]:
    """Lays chunks, which are in packed order, end to end, and lists their media rows."""
    contexts = [_context(chunk, block_tokens) for chunk in chunks]
    total = sum(chunk.end - chunk.start for chunk in chunks)
    num_decodes = next((index for index, chunk in enumerate(chunks) if chunk.tokens > 1), len(chunks))
    ids, positions, slots = np.empty(total, np.int64), np.empty((3, total), np.int64), np.empty(total, np.int64)
    _fill_decodes(chunks[:num_decodes], ids, positions)
    starts = np.array([chunk.start for chunk in chunks[:num_decodes]], np.int64)
    last_blocks = np.array([context.blocks[-1] for context in contexts[:num_decodes]], np.int64)
    slots[:num_decodes] = last_blocks * block_tokens + starts % block_tokens
    media: list[MediaRows] = []
    logit_rows = [row for row, chunk in enumerate(chunks[:num_decodes]) if chunk.samples]
    for row, chunk in enumerate(chunks[:num_decodes]):
        if chunk.start < chunk.request.prompt.tokens:
            media.extend(media_rows(chunk, row))
    at = num_decodes
    for chunk, context in zip(chunks[num_decodes:], contexts[num_decodes:], strict=True):
        end = at + chunk.tokens
        fill(chunk, ids[at:end], positions[:, at:end])
        slots[at:end] = slots_of(context.blocks, chunk.start, chunk.end, block_tokens)
        media.extend(media_rows(chunk, at))
        if chunk.samples:
            logit_rows.extend(range(end - 1 - chunk.num_draft_tokens, end))
        at = end
    packed = Packed(
        contexts=tuple(contexts),
        num_decodes=num_decodes,
        ids=ids,
        positions=positions,
        slots=slots,
        media_rows=np.concatenate([np.empty(0, np.int64), *(np.arange(each.at, each.end) for each in media)]),
        unread_rows=np.array([row for row, chunk in enumerate(chunks) if chunk.request.num_unread], np.int64),
        logit_rows=np.array(logit_rows, np.int64),
        adapted=tuple(_adapted_rows(chunks)),
        states=tuple(_state_use(chunk) for chunk in chunks if chunk.request.holding.states.next),
    )
    return packed, tuple(media)


def _state_use(chunk: Chunk) -> StateUse:
    states = chunk.request.holding.states
    *saves, (_, write) = states.next
    return StateUse(states.current, write, tuple((tokens - chunk.start, slot) for tokens, slot in saves))


def _adapted_rows(chunks: Sequence[Chunk]) -> Iterator[AdaptedRows]:
    at = 0
    for adapter, same in groupby(chunks, key=lambda chunk: chunk.request.adapter):
        end = at + sum(chunk.tokens for chunk in same)
        if adapter:
            yield AdaptedRows(adapter.digest, at, end)
        at = end


def slots_of(blocks: Sequence[int] | Int32Array | Int64Array, start: int, end: int, block_tokens: int) -> Int64Array:
    """Cache slots of tokens [start, end) of the sequence with this block table: int64 [end − start]."""
    tokens = np.arange(start, end)
    return np.asarray(blocks, np.int64)[tokens // block_tokens] * block_tokens + tokens % block_tokens


def media_rows(chunk: Chunk, at: int) -> Iterator[MediaRows]:
    """The media rows inside a chunk that starts at packed row `at`; its other rows are text."""
    spans = chunk.request.prompt.spans
    if not spans or chunk.start >= spans[-1].end:
        return
    for span in spans[max(0, bisect_right(spans, chunk.start, key=attrgetter("offset")) - 1) :]:
        start, end = max(span.offset, chunk.start), min(span.end, chunk.end)
        if span.offset >= chunk.end:
            return
        if start < end:
            yield MediaRows(
                at=at + start - chunk.start,
                rows=end - start,
                request=chunk.request,
                media_index=span.media_index,
                first_row=span.first_row + start - span.offset,
            )


def _context(chunk: Chunk, block_tokens: int) -> Context:
    return Context(chunk.start, chunk.end, chunk.request.holding.blocks.array[: -(-chunk.end // block_tokens)])


def _fill_decodes(chunks: Sequence[Chunk], ids: Int64Array, positions: Int64Array) -> None:
    """Fills the rows of chunks of one token, the first ones. The id of an unread token is 0."""
    known, places = [], []
    for chunk in chunks:
        request, place = chunk.request, chunk.start - chunk.request.prompt.tokens
        known.append(0 if place < 0 or request.num_unread else request.output_ids[place])
        places.append(chunk.start + request.prompt.delta)
    ids[: len(chunks)], positions[:, : len(chunks)] = known, places
    for row, chunk in enumerate(chunks):
        prompt = chunk.request.prompt
        if chunk.start < prompt.tokens:
            ids[row], positions[:, row] = prompt.ids[chunk.start], prompt.positions[:, chunk.start]


def fill(chunk: Chunk, ids: Int64Array, positions: Int64Array) -> None:
    """Fills the rows of a chunk, which reaches into the answer when a preempted request is recomputed."""
    request, prompt = chunk.request, chunk.request.prompt
    inside = max(0, min(chunk.end, prompt.tokens) - chunk.start)
    ids[:inside] = prompt.ids[chunk.start : chunk.start + inside]
    positions[:, :inside] = prompt.positions[:, chunk.start : chunk.start + inside]
    if inside < chunk.tokens:
        first = max(chunk.start, prompt.tokens)
        own = [*request.output_ids[first - prompt.tokens :], *chunk.draft_tokens]
        ids[inside:] = own[: chunk.end - first]
        positions[:, inside:] = np.arange(first, chunk.end) + prompt.delta
