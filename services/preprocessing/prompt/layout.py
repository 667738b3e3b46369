"""The full prompt: token ids, positions, and where each media item's tokens stand.

    pieces:    [ids 0..4)  GridTokens  [ids]  GridTokens  [ids …)
    input_ids: [ text     ][pad pad pad][text][pad pad pad][text  ]
    runs:                   ─────────── one a grid ──────────

A family says what a media item becomes; this module joins the pieces and knows no family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from common.contract.plan import Int32Array, Run
from services.preprocessing.prompt.positions import GridSpan, TextSpan, positions_of

# What a media item becomes: grids, and the family's own text, control tokens included, where it puts some around them.
Expansion: TypeAlias = tuple[str | GridSpan, ...]


@dataclass(frozen=True, slots=True)
class GridTokens:
    """One grid of media item `item`, as so many of `pad_id`."""

    item: int
    pad_id: int
    span: GridSpan

    @property
    def size(self) -> int:
        return self.span.grid.tokens


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """input_ids int32 [N], positions int32 [3, N], and the runs of each media item in the prompt's order."""

    input_ids: Int32Array
    positions: Int32Array
    runs: tuple[tuple[Run, ...], ...]


def lay_out(pieces: Sequence[Int32Array | GridTokens]) -> Layout:
    """Joins text ids (int32 [n]) and grids, items in order, into the full prompt, as if nothing would be pruned."""
    ids: list[Int32Array] = []
    spans: list[TextSpan | GridSpan] = []
    runs: dict[int, list[Run]] = {}
    offset = 0
    for piece in pieces:
        if isinstance(piece, GridTokens):
            ids.append(np.full(piece.size, piece.pad_id, np.int32))
            spans.append(piece.span)
            runs.setdefault(piece.item, []).append(Run(offset, piece.size))
        else:
            ids.append(piece)
            spans.append(TextSpan(piece.size))
        offset += piece.size
    return Layout(np.concatenate(ids), positions_of(spans), tuple(map(tuple, runs.values())))
