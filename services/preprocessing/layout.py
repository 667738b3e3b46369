"""The full prompt: token ids, positions, and where each media item's tokens stand.

    pieces:    [ids 0..4)  MediaTokens(text? grid text? grid …)   [ids …)
    input_ids: [ text     ][pad pad pad pad pad pad             ][text  ]
    runs:                   ───────── one a grid ─────────

A family says what a media item's placeholder becomes; this module joins the pieces and knows no family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from common.plan import Int32Array, Run
from services.preprocessing.positions import GridSpan, TextSpan, positions_of


@dataclass(frozen=True, slots=True, eq=False)
class MediaTokens:
    """What one placeholder becomes: grids of `pad_id`, and text (int32 [n]) where a family puts some between."""

    pad_id: int
    pieces: tuple[Int32Array | GridSpan, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """input_ids int32 [N], positions int32 [3, N], and the runs of each media item in the prompt's order."""

    input_ids: Int32Array
    positions: Int32Array
    runs: tuple[tuple[Run, ...], ...]


def lay_out(pieces: Sequence[Int32Array | MediaTokens]) -> Layout:
    """Joins text ids (int32 [n]) and media into the full prompt, as if nothing would ever be pruned."""
    ids: list[Int32Array] = []
    spans: list[TextSpan | GridSpan] = []
    runs: list[tuple[Run, ...]] = []
    offset = 0
    for piece in pieces:
        parts = piece.pieces if isinstance(piece, MediaTokens) else (piece,)
        held: list[Run] = []
        for part in parts:
            if isinstance(part, GridSpan):
                assert isinstance(piece, MediaTokens)
                ids.append(np.full(part.grid.tokens, piece.pad_id, np.int32))
                spans.append(part)
                held.append(Run(offset, part.grid.tokens))
            else:
                ids.append(part)
                spans.append(TextSpan(part.size))
            offset += ids[-1].size
        if isinstance(piece, MediaTokens):
            runs.append(tuple(held))
    return Layout(np.concatenate(ids), positions_of(spans), tuple(runs))
