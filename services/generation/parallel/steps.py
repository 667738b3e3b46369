"""A packed batch as bytes, from rank 0 to the others: one run of int64 numbers, how many of each kind first.

It knows neither torch nor who sends.
"""

from __future__ import annotations

from itertools import accumulate, chain

import numpy as np

from services.generation.request.batch import AdaptedRows, Context, Packed

# The kinds whose counts come first: `num_decodes`, and the parts.
_PARTS = 12
_HEAD = 1 + _PARTS
_DIGEST = 4  # numbers of an adapter's


def to_bytes(packed: Packed) -> bytes:
    contexts, adapted = packed.contexts, packed.adapted
    parts = [
        packed.ids,
        packed.positions.ravel(),
        packed.slots,
        packed.media_rows,
        packed.last_rows,
        np.array([each.start for each in contexts], np.int64),
        np.array([each.end for each in contexts], np.int64),
        np.array([len(each.blocks) for each in contexts], np.int64),
        np.fromiter(chain.from_iterable(each.blocks for each in contexts), np.int64),
        np.array([each.start for each in adapted], np.int64),
        np.array([each.end for each in adapted], np.int64),
        np.frombuffer(b"".join(each.digest for each in adapted), np.int64),
    ]
    assert len(parts) == _PARTS
    head = np.array([packed.num_decodes, *(part.size for part in parts)], np.int64)
    return np.concatenate([head, *parts]).tobytes()


def from_bytes(data: bytes) -> Packed:
    numbers = np.frombuffer(data, np.int64)
    num_decodes, *sizes = numbers[:_HEAD].tolist()
    ids, positions, slots, media_rows, last_rows, starts, ends, counts, blocks, firsts, lasts, digests = (
        # Copied: torch wants arrays that may be written to.
        numbers[_HEAD + end - size : _HEAD + end].copy()
        for size, end in zip(sizes, accumulate(sizes), strict=True)
    )
    own = blocks.tolist()
    each = zip(starts.tolist(), ends.tolist(), counts.tolist(), accumulate(counts.tolist()), strict=True)
    return Packed(
        contexts=tuple(Context(start, end, own[last - count : last]) for start, end, count, last in each),
        num_decodes=num_decodes,
        ids=ids,
        positions=positions.reshape(3, -1),
        slots=slots,
        media_rows=media_rows,
        last_rows=last_rows,
        adapted=tuple(
            AdaptedRows(digest.tobytes(), start, end)
            for start, end, digest in zip(firsts.tolist(), lasts.tolist(), digests.reshape(-1, _DIGEST), strict=True)
        ),
    )
