"""What a load generator asks: lines of a file, or questions about clips of its own; and how rates take turns.

    number     0        1        2        3            with two rates, every question is asked at both,
    question   A        A        B        B            one after the other, so that both see the same mix
    rate       0        0.75     0        0.75

It knows nothing of when questions are asked, nor of what is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from common.contract.errors import InvalidRequest
from common.contract.retention import Pruning
from framesieve.bench.clips import clips, stamped
from framesieve.client.prompt import Image, Video, is_url, media_of

QUESTIONS = ("What moves?", "What happens?", "How many objects are there?")
_MOST_OF_A_VALUE = 60


@dataclass(frozen=True, slots=True)
class Question:
    """One question as it is sent. max_new_tokens: None is the run's."""

    media: Image | Video | None
    text: str
    pruning: Pruning
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """What may be asked, `weight` times as often as an entry of weight 1. None is the run's own."""

    media: Image | Video | None
    text: str
    pruning_rate: float | None = None
    method: str | None = None
    max_new_tokens: int | None = None
    weight: float = 1.0


class Workload:
    """Entries in turns, each asked once at every one of `prunings`.

    Turns are smooth weighted round robin: entries of equal weight come in their order, again and again, and in any
    stretch of turns each has its share.
    unique: a video's bytes are new to every cache each time it is asked about; its film is the same.
    """

    def __init__(self, entries: Sequence[Entry], prunings: Sequence[Pruning], *, unique: bool = False) -> None:
        assert entries
        assert prunings
        self._entries = tuple(entries)
        self._prunings = tuple(prunings)
        self._unique = unique
        self._turns: list[Entry] = []
        self._credits = [0.0] * len(self._entries)

    def question(self, number: int) -> Question:
        """The question of this number, counted from 0."""
        turn, at = divmod(number, len(self._prunings))
        while len(self._turns) <= turn:
            self._turns.append(self._next_turn())
        entry, pruning = self._turns[turn], self._prunings[at]
        media = entry.media
        if self._unique and isinstance(media, Video) and media.data is not None:
            media = replace(media, data=stamped(media.data))
        rate = pruning.rate if entry.pruning_rate is None else entry.pruning_rate
        return Question(media, entry.text, Pruning(rate, entry.method or pruning.method), entry.max_new_tokens)

    def _next_turn(self) -> Entry:
        """Everyone is credited their weight; the richest has the turn, and pays what all were credited."""
        for index, entry in enumerate(self._entries):
            self._credits[index] += entry.weight
        richest = max(range(len(self._entries)), key=self._credits.__getitem__)
        self._credits[richest] -= sum(entry.weight for entry in self._entries)
        return self._entries[richest]


def synthesised(seed: int) -> list[Entry]:
    """Every clip of `clips(seed)` with every one of QUESTIONS, so that clips of all kinds come one after the other."""
    films = clips(seed)
    return [Entry(Video(data=film), text) for text in QUESTIONS for film in films]


# --- files ------------------------------------------------------------------------------------------------------


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    video: str | None = Field(None, min_length=1)
    image: str | None = Field(None, min_length=1)
    url: str | None = Field(None, min_length=1)
    question: str = Field(min_length=1)
    pruning_rate: float | None = Field(None, ge=0, lt=1)
    method: Literal["evs", "vidcom2", "random", "none"] | None = None
    max_new_tokens: int | None = Field(None, ge=1)
    weight: float = Field(1.0, gt=0)


def read_workload(path: Path, *, on_server: bool = False) -> list[Entry]:
    """The entries of a JSON-lines file; blank lines are skipped.

    Each line is an object with `question` and at most one of `video`, `image` (paths, relative to the file's folder)
    and `url`; and, where they differ from the run's, `pruning_rate`, `method`, `max_new_tokens`, `weight`.
    on_server: paths are below preprocessing's --media-root.
    Raises InvalidRequest, which names line, field, value and limit, and OSError where the file cannot be read.
    """
    entries = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} must be UTF-8 text, byte {error.start} is not") from error
    for number, text in enumerate(lines, start=1):
        if text.strip():
            place = f"{path}, line {number}"
            try:
                line = _Line.model_validate_json(text)
            except ValidationError as error:
                raise InvalidRequest(f"{place}: {_first(error)}") from error
            media = _media(line, place, path.parent, on_server)
            entries.append(
                Entry(media, line.question, line.pruning_rate, line.method, line.max_new_tokens, line.weight)
            )
    if not entries:
        raise InvalidRequest(f"{path} must have at least 1 line, got 0")
    return entries


def _first(error: ValidationError) -> str:
    found = error.errors()[0]
    field = ".".join(map(str, found["loc"]))
    if found["type"] == "missing":
        return f"{field}: {found['msg']}"
    if found["type"] == "extra_forbidden":
        return f"{field}: there is no such field, the fields are {', '.join(_Line.model_fields)}"
    value = repr(found["input"])
    shown = value if len(value) <= _MOST_OF_A_VALUE else f"{value[:_MOST_OF_A_VALUE]}…"
    return f"{field + ': ' if field else ''}{found['msg']}, got {shown}"


def _media(line: _Line, place: str, folder: Path, on_server: bool) -> Image | Video | None:
    given = [name for name in ("video", "image", "url") if getattr(line, name) is not None]
    if len(given) > 1:
        raise InvalidRequest(f"{place}: at most one of video, image and url, got {', '.join(given)}")
    if line.url is not None:
        if not is_url(line.url):
            raise InvalidRequest(f"{place}: url: must start with http://, https:// or data:, got {line.url!r}")
        return media_of(line.url)
    location = line.video or line.image
    if location is None:
        return None
    kind = Video if line.video is not None else Image
    if on_server:
        return kind(server_path=location)
    if not (folder / location).is_file():
        raise InvalidRequest(f"{place}: {given[0]}: must name a file, got {location!r}, which is none")
    return kind(folder / location)
