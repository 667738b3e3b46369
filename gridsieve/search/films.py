"""Files of films, and their parts, as the store of an index has them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FilmFile:
    """A file of a folder. path: relative to the folder, with slashes. modified_ns: when it was changed last."""

    path: str
    size_bytes: int
    modified_ns: int


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a film: the frames that are first shown in [start_s, end_s), seconds from the film's first frame.

    Both are the time of a frame, a window's limit or the film's end, and never later than it by rounding.
    """

    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class FilmMoment:
    """A part of a film. path: relative to the folder. start_s, end_s: seconds from the film's first frame.

    score: the cosine of its vector and the text's, -1 to 1; None for a moment that was not searched for.
    """

    path: str
    start_s: float
    end_s: float
    score: float | None = None
