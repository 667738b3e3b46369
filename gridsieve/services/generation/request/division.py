"""A step divided into forwards of fixed numbers of rows, so that no row's numbers depend on how many others there are.

    step:      [d][d][ A  A  A  A  A  A  A  A ][ B  B  B ]
    forwards:  [d  d  A  A  A  A  A  A ]                         each of 8 rows
                                       [A  A  B  B  B  ·  ·  ·]  ·: padding, in no sequence

A chunk that is cut is computed in order: what follows reads the keys, values and recurrent state of what came before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gridsieve.services.generation.request.batch import AdaptedRows, Context, Int64Array, Packed, StateUse


@dataclass(frozen=True, slots=True)
class Forward:
    """Rows [first, end) of a step.

    packed: these rows and, after them, padding, whose slots are in the padding block. It samples nothing. media: which
    of the step's media rows it has.
    """

    packed: Packed
    first: int
    end: int
    media: slice

    @property
    def padding(self) -> int:
        """Number of rows after those of the step."""
        return len(self.packed.ids) - (self.end - self.first)


def divided(rows: int, sizes: Sequence[int]) -> Iterator[int]:
    """How many of `rows` rows each forward takes.

    A forward has one of `sizes`: the smallest that holds what is left if that fills at least half of it, or if there is
    none smaller; else as large a one as is filled.
    """
    ascending = sorted(sizes)
    while rows:
        size = next((each for each in ascending if each >= rows), ascending[-1])
        if 2 * rows < size:
            size = max((each for each in ascending if each <= rows), default=size)
        yield min(rows, size)
        rows -= min(rows, size)


def padded_size(rows: int, sizes: Sequence[int]) -> int:
    """The size of the forward of so many rows, as `divided` gives them."""
    return min(each for each in sizes if each >= rows)


def divide(packed: Packed, sizes: Sequence[int], block_tokens: int, padding_block: int) -> Iterator[Forward]:
    """The forwards of a step, in the order in which they must be computed."""
    first = 0
    for count in divided(len(packed.ids), sizes):
        end = first + count
        padding = padded_size(count, sizes) - count
        media = slice(*np.searchsorted(packed.media_rows, (first, end)).tolist())
        unread = packed.unread_rows[(packed.unread_rows >= first) & (packed.unread_rows < end)]
        contexts, states = _cut(packed, first, end, block_tokens)
        own = replace(
            packed,
            contexts=tuple(contexts),
            num_decodes=max(0, min(end, packed.num_decodes) - first),
            ids=_padded(packed.ids[first:end], padding),
            positions=_padded(packed.positions[:, first:end], padding),
            slots=_padded(packed.slots[first:end], padding, padding_block * block_tokens),
            media_rows=packed.media_rows[media] - first,
            logit_rows=packed.logit_rows[:0],
            adapted=tuple(
                AdaptedRows(each.digest, max(each.start, first) - first, min(each.end, end) - first)
                for each in packed.adapted
                if each.start < end and each.end > first
            ),
            states=tuple(states),
            unread_rows=unread - first,
        )
        yield Forward(own, first, end, media)
        first = end


def _cut(packed: Packed, first: int, end: int, block_tokens: int) -> tuple[list[Context], list[StateUse]]:
    """What rows [first, end) have of the chunks, and of their states."""
    contexts, states, at = list[Context](), list[StateUse](), 0
    for number, chunk in enumerate(packed.contexts):
        begin, stop = max(first - at, 0), min(end - at, chunk.tokens)
        if begin < stop:
            tokens = chunk.start + stop
            contexts.append(Context(chunk.start + begin, tokens, chunk.blocks[: -(-tokens // block_tokens)]))
            if packed.states:
                use = packed.states[number]
                saves = tuple((place - begin, slot) for place, slot in use.saves if begin < place <= stop)
                # What was computed of the chunk so far is in the slot that it writes.
                states.append(StateUse(use.write if begin else use.read, use.write, saves))
        at += chunk.tokens
    return contexts, states


def _padded(rows: Int64Array, padding: int, value: int = 0) -> Int64Array:
    """[.., n] to [.., n + padding]."""
    found: Int64Array = np.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, padding)], constant_values=value)
    return found
