"""What a session of a model with a recurrent state begins again with, because such a state cannot forget.

    full     [opening, slice 0][1][2][3][question, answer][5][6]│ the next slice does not fit
    again    [opening, slice 3][question, answer][5][6]│ next   │ at most half of the window, then what comes

Of a window of W rows that begins again with R ≤ W / 2 of them, W − R are added until it is full the next time: the
language model computes W / (W − R) rows, at most two, for each row that a caller adds, R of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from framesieve.services.generation.request.session import Session
from framesieve.services.generation.rpc.live.frames import Slice

T = TypeVar("T")


def newest_half(
    window: Sequence[tuple[int, Slice | T]], session: Session, oldest_s: float
) -> list[tuple[int, Slice | T]]:
    """The newest segments of a window that need at most half of its tokens when the session begins with them.

    window: numbers and segments, the newest one last. oldest_s: a slice before this time goes, and all before it.
    """
    # A slice that comes first needs what segment 0 has: the opening, and a whole slice. A question needs more.
    room, first = session.window_tokens // 2 - session.rows_of(0), len(window)
    for place in range(len(window) - 1, -1, -1):
        number, piece = window[place]
        rows = session.rows_of(number)
        if room < (0 if isinstance(piece, Slice) else rows):
            break
        if isinstance(piece, Slice) and piece.last.time_s < oldest_s:
            break
        first, room = place, room - rows
    return list(window[first:])
