"""The last segments of a session: which of them are too old, and with which of them the session begins again.

A recurrent state cannot forget, so a session of a model that has one begins again before its window overflows:

    full     [opening, slice 0][1][2][3][question, answer][5][6]│ the next slice does not fit
    again    [opening, slice 3][question, answer][5][6]│ next   │ at most half of the window, then what comes

Of a window of W rows that begins again with R ≤ W / 2 of them, W − R are added until it is full the next time: the
language model computes W / (W − R) rows, at most two, for each row that a caller adds, R of them at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import dropwhile
from typing import TypeAlias

from gridsieve.common.contract.errors import PromptTooLong
from gridsieve.common.contract.limits import MAX_INLINE_BYTES
from gridsieve.services.generation.live.frames import MAX_LENGTH_S, FramePair, microseconds
from gridsieve.services.generation.request.session import Session

# With how many of its last segments a session begins again, at most. Their pictures, of so many bytes at most, stay on
# the host.
MAX_REPEATED, MAX_REPEATED_BYTES = 32, MAX_INLINE_BYTES


@dataclass(frozen=True, slots=True)
class Answered:
    """A question with its answer."""

    texts: Sequence[str]
    answer: str
    thought: str


# The number of a segment, and what it shows or says. Several slices of text alone may be of one segment.
Numbered: TypeAlias = tuple[int, FramePair | Answered]


class Window:
    """window_s: how old a slice may be, beside the newest one. recurrent: whether the model has a recurrent state.

    opening: rows of text before the first slice, the last time that the session began with one.
    """

    opening = 0

    def __init__(self, session: Session, window_s: float, recurrent: bool) -> None:
        self._session, self._recurrent = session, recurrent
        self._window_us = microseconds(min(window_s, MAX_LENGTH_S))
        self._times: deque[tuple[int, int]] = deque()  # segment and time of each slice that is not too old
        self._last: deque[Numbered] = deque()

    def remember(self, number: int, shown: FramePair | Answered) -> None:
        """Remembers what segment `number` shows or says, and forgets what is beyond the limits above."""
        if isinstance(shown, FramePair):
            self._times.append((number, shown.last.time_us))
        self._last.append((number, shown))
        size_bytes = sum(each.size_bytes for _, each in self._last if isinstance(each, FramePair))
        while len(self._last) > MAX_REPEATED or size_bytes > MAX_REPEATED_BYTES:
            _, first = self._last.popleft()
            size_bytes -= first.size_bytes if isinstance(first, FramePair) else 0

    def check_fits(self, tokens: int) -> None:
        """Raises PromptTooLong if a slice of so many tokens is too large for an empty window."""
        if (needed := self.opening + tokens) > (window_tokens := self._session.window_tokens):
            raise PromptTooLong(
                f"the messages before a session's first frame and a slice need {needed} tokens, its window has "
                f"{window_tokens}",
                value=needed,
                limit=window_tokens,
                remedy="raise `window_tokens`, or lower `max_pixels`",
            )

    def keep_less(self) -> bool:
        """Forgets the oldest slice that the session would begin again with, and what came before it.

        Returns False if there is none.
        """
        while self._last:
            _, oldest = self._last.popleft()
            if isinstance(oldest, FramePair):
                return True
        return False

    def clear(self) -> None:
        self._times.clear()
        self._last.clear()

    def oldest_beside(self, newest: FramePair) -> int:
        """The segments below this number are too old beside a slice; 0: none."""
        oldest = 0
        first = 0 if self._recurrent else self._session.first  # of the segments that may be evicted
        while self._times and self._times[0][0] < first:
            self._times.popleft()
        while self._times and self._times[0][1] < newest.last.time_us - self._window_us:
            number, _ = self._times.popleft()
            if not self._times or self._times[0][0] > number:  # no newer slice is in this segment
                oldest = number + 1
        return oldest

    def staying(self, newest: FramePair | None) -> Sequence[Numbered]:
        """What a session begins again with, before a slice or, None, a question.

        Segment 0, which is pinned, is among it only where nothing after it was evicted.
        """
        first = self._session.first
        staying = [each for each in self._last if each[0] >= first or first == 1]
        if not self._recurrent:  # the first one stays for ever, so it is a slice
            return list(dropwhile(lambda each: isinstance(each[1], Answered), staying))
        return self._newest_half(staying, newest.last.time_us - self._window_us / 2 if newest else -math.inf)

    def _newest_half(self, last: Sequence[Numbered], oldest_us: float) -> list[Numbered]:
        """The newest segments that need at most half of the window's tokens when the session begins with them.

        oldest_us: a slice before this time goes, and all before it.
        """
        # A slice that comes first needs what segment 0 has: the opening, and a whole slice. A question needs more.
        room, first = self._session.window_tokens // 2 - self._session.rows_of(0), len(last)
        for place in range(len(last) - 1, -1, -1):
            number, shown = last[place]
            rows = self._session.rows_of(number)
            if room < (0 if isinstance(shown, FramePair) else rows):
                break
            if isinstance(shown, FramePair) and shown.last.time_us < oldest_us:
                break
            first, room = place, room - rows
        return list(last[first:])
