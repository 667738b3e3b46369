"""Text of one answer that arrives in pieces, and reading it in steps that wait for the next piece.

    unread.text     'Let me look.<tool'          a mark may begin here, so that "<tool" waits
    yield from unread.to(["<tool_call>"], say)   says 'Let me look.', then waits at each `yield` for more text

Each character is looked at once. It knows no form of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from typing import TypeAlias, TypeVar

R = TypeVar("R")
Steps: TypeAlias = Generator[None, None, R]
"""Reads until it has its result; each step waits for more text."""


class CutOff(Exception):
    """The answer ended before what was read."""


class UnreadText:
    """text: what has arrived and is not read. ended: no more arrives. taken: what was read since it was emptied."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self.taken: list[str] = []

    def to(self, marks: Sequence[str], say: Callable[[str], None]) -> Steps[str]:
        """Reads past the first of the marks, which it returns, and says the text before it. Raises CutOff."""
        while True:
            if found := min(((place, each) for each in marks if (place := self.text.find(each)) >= 0), default=None):
                place, mark = found
                self._say(place, say)
                return self._take(len(mark))
            self._say(len(self.text) - self._held(marks), say)
            yield from self._more()

    def starts(self, marks: Sequence[str]) -> Steps[str]:
        """Reads past blanks and the mark that follows them, which it returns; "", and nothing is read, if none does."""
        blanks: list[str] = []
        while True:
            begun = self.text.lstrip()
            blanks.append(self.text[: len(self.text) - len(begun)])
            self.text = begun
            if mark := next((each for each in marks if begun.startswith(each)), ""):
                self.taken += blanks
                return self._take(len(mark))
            if self.ended or not any(mark.startswith(begun) for mark in marks):
                self.text = "".join((*blanks, begun))
                return ""
            yield

    def nested(self, nesting: Nesting, depths: Collection[int], mark: str, say: Callable[[str], None]) -> Steps[str]:
        """Says JSON up to one of the depths and returns "", or reads past the mark, which it returns. Raises CutOff."""
        while True:
            place = self.text.find(mark) if mark else -1
            limit = place if place >= 0 else len(self.text) - self._held([mark] if mark else [])
            reached = nesting.find(depths, self.text[:limit])
            self._say(limit if reached is None else reached, say)
            if reached is not None:
                return ""
            if place >= 0:
                return self._take(len(mark))
            yield from self._more()

    def _more(self) -> Steps[None]:
        if self.ended:
            raise CutOff
        yield

    def _held(self, marks: Sequence[str]) -> int:
        """How many characters at the end of the text may be the beginning of a mark."""
        if self.ended:
            return 0
        sizes = (size for mark in marks for size in range(len(mark) - 1, 0, -1) if self.text.endswith(mark[:size]))
        return max(sizes, default=0)

    def _say(self, size: int, say: Callable[[str], None]) -> None:
        if size:
            say(self._take(size))

    def _take(self, size: int) -> str:
        taken, self.text = self.text[:size], self.text[size:]
        self.taken.append(taken)
        return taken


class Nesting:
    """How deep JSON that arrives in pieces is nested."""

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self._in_string = False
        self._escaped = False

    def find(self, depths: Collection[int], text: str) -> int | None:
        """How many characters of the next piece lead to one of the depths, with its bracket; None: all do not."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[}]":
                self.depth += 1 if character in "{[" else -1
                if self.depth in depths:
                    return place + 1
        return None
