"""The full prompt: token ids, positions, and the runs of tokens that belong to each media item.

    pieces:    [ids 0..4)  MediaTokens  [ids]  MediaTokens  [ids …)
    input_ids: [ text     ][pad pad pad][text][pad pad pad][text  ]
    runs:                   ──────── one run for each grid ────────

A video with its sound is two items, whose grids take turns. A family expands each media item into pieces; this module
joins the pieces and knows no family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np

from gridsieve.common.contract.plan import FrameShape, Grid, Int32Array, Run
from gridsieve.services.preprocessing.prompt.canvas import CanvasSpan, canvas_positions
from gridsieve.services.preprocessing.prompt.positions import (
    MediaSpan,
    PartSpan,
    SharedSpan,
    Span,
    TextSpan,
    positions_of,
)
from gridsieve.services.preprocessing.video.resize import View


@dataclass(frozen=True, slots=True)
class SharedToken:
    """A control token of a family that has the position of the token before it, or of the token behind it."""

    text: str
    before: bool


# The expansion of a media item: its spans, and the family's own text between them, control tokens included. A number is
# the id of a vector that generation stores, which no text spells. That of a video with its sound has the parts of both.
Expansion: TypeAlias = tuple[str | int | MediaSpan | PartSpan | CanvasSpan | SharedToken, ...]


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """How an image is sent and laid out: its frames, what each of them shows (None: all), its grid and expansion.

    Of a video: views are those of the pictures in which each frame is sent.
    """

    frames: FrameShape
    views: tuple[View | None, ...]
    grid: Grid
    expansion: Expansion


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """One span of media item `item`: as many tokens `pad_id` as it has."""

    item: int
    pad_id: int
    span: MediaSpan | PartSpan | CanvasSpan

    @property
    def size(self) -> int:
        return self.span.tokens


@dataclass(frozen=True, slots=True)
class SharedId:
    """A text token whose position is shared: its id, and how."""

    id: int
    span: SharedSpan
    size: ClassVar[int] = 1


# Text ids (int32 [n]), and what has positions of its own.
Piece: TypeAlias = Int32Array | MediaTokens | SharedId


@dataclass(frozen=True, slots=True, eq=False)
class Layout:
    """input_ids int32 [N], positions int32 [3, N], and the runs of each media item in the prompt's order."""

    input_ids: Int32Array
    positions: Int32Array
    runs: tuple[tuple[Run, ...], ...]


def lay_out(pieces: Sequence[Piece], canvas_markers: Sequence[int] = ()) -> Layout:
    """Joins text ids (int32 [n]) and grids into the full, unpruned prompt. Items must begin in order.

    canvas_markers: of `canvas_positions`, where the grids are spans of canvases.
    """
    ids: list[Int32Array] = []
    spans: list[Span] = []
    pictures: list[tuple[int, CanvasSpan]] = []
    runs: dict[int, list[Run]] = {}
    offset = 0
    for piece in pieces:
        if isinstance(piece, MediaTokens):
            ids.append(np.full(piece.size, piece.pad_id, np.int32))
            if isinstance(piece.span, CanvasSpan):
                pictures.append((offset, piece.span))
            else:
                spans.append(piece.span)
            runs.setdefault(piece.item, []).append(Run(offset, piece.size))
        elif isinstance(piece, SharedId):
            ids.append(np.array([piece.id], np.int32))
            spans.append(piece.span)
        else:
            ids.append(piece)
            spans.append(TextSpan(piece.size))
        offset += piece.size
    input_ids = np.concatenate(ids)
    positions = canvas_positions(input_ids, pictures, canvas_markers) if pictures else positions_of(spans)
    return Layout(input_ids, positions, tuple(map(tuple, runs.values())))
