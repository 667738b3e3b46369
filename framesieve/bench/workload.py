"""The questions of a load: lines of a file or questions about synthetic clips, at alternating pruning rates.

    number     0        1        2        3            with two rates, each question is asked at both,
    question   A        A        B        B            one after the other, so that both see the same mix
    rate       0        0.75     0        0.75

It knows nothing of when requests are sent, or of their results.
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
_MAX_VALUE_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the load. max_new_tokens: None: the run's."""

    media: Image | Video | None
    text: str
    pruning: Pruning
    max_new_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A line of the workload, asked `weight` times as often as one of weight 1. None: the run's setting."""

    media: Image | Video | None
    text: str
    pruning_rate: float | None = None
    method: str | None = None
    max_new_tokens: int | None = None
    weight: float = 1.0


class Workload:
    """An endless sequence of questions: smooth weighted round robin over the entries, each asked at all prunings.

    Entries of equal weight repeat in order, and in any interval every entry has its share.
    unique: stamp each video's bytes, so that it never hits a cache.
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
        """The question of a number, counted from 0."""
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
        """Adds each entry's weight to its credit, picks the largest credit and subtracts the sum of weights from it."""
        for index, entry in enumerate(self._entries):
            self._credits[index] += entry.weight
        richest = max(range(len(self._entries)), key=self._credits.__getitem__)
        self._credits[richest] -= sum(entry.weight for entry in self._entries)
        return self._entries[richest]


def synthesised(seed: int) -> list[Entry]:
    """Every clip of `clips(seed)` with each of QUESTIONS; consecutive entries have different kinds of clips."""
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
    method: Literal["evs", "evs_causal", "vidcom2", "vcast", "random", "none"] | None = None
    max_new_tokens: int | None = Field(None, ge=1)
    weight: float = Field(1.0, gt=0)


def read_workload(path: Path, *, on_server: bool = False) -> list[Entry]:
    """The entries of a JSON Lines file; blank lines are skipped.

    Each line is an object with `question`, at most one of `video`, `image` (paths relative to the file's folder) and
    `url`, and optionally `pruning_rate`, `method`, `max_new_tokens` and `weight`, which override the run's settings.
    on_server: paths are below preprocessing's --media-root.
    Raises InvalidRequest naming line, field, value and limit, and OSError if the file cannot be read.
    """
    entries = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} must be UTF-8 text, byte {error.start} is invalid") from error
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
        return f"{field}: unknown field, must be one of {', '.join(_Line.model_fields)}"
    value = repr(found["input"])
    shown = value if len(value) <= _MAX_VALUE_CHARACTERS else f"{value[:_MAX_VALUE_CHARACTERS]}…"
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
        raise InvalidRequest(f"{place}: {given[0]}: must name a file, got {location!r}, which does not exist")
    return kind(folder / location)
