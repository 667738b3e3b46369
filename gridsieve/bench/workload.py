"""The questions of a load: those of a file (JSON Lines, or ShareGPT), or questions about synthetic clips.

It knows nothing of when requests are sent, or of their results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gridsieve.bench.clips import clips, stamped
from gridsieve.bench.sharegpt import file_of, first_error, read_sharegpt
from gridsieve.client.prompt import Image, Part, Video, is_url, media_of, user_turn
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.retention import Pruning

QUESTIONS = ("What moves?", "What happens?", "How many objects are there?")


@dataclass(frozen=True, slots=True)
class Question:
    """One request of the load.

    parts: the user's turn. max_new_tokens: None: the run's.
    unique: whether each mp4 file that is sent gets other bytes, so that it never hits a cache.
    """

    parts: tuple[Part, ...]
    pruning: Pruning
    max_new_tokens: int | None = None
    unique: bool = False

    def read(self) -> tuple[Part, ...]:
        """The parts to send; if unique, with the stamped bytes of files. Raises OSError for a file that is gone."""
        return tuple(_stamped(part) for part in self.parts) if self.unique else self.parts


@dataclass(frozen=True, slots=True)
class Entry:
    """A question of the workload, asked `weight` times as often as one of weight 1. None: the run's setting."""

    parts: tuple[Part, ...]
    pruning_rate: float | None = None
    method: str | None = None
    max_new_tokens: int | None = None
    weight: float = 1.0


class Workload:
    """An endless sequence of questions: smooth weighted round robin over the entries.

    Entries of equal weight repeat in order, and in any interval every entry has its share.
    unique: that of its questions.
    """

    def __init__(self, entries: Sequence[Entry], *, unique: bool = False) -> None:
        assert entries
        self._entries = tuple(entries)
        self._unique = unique
        self._turns: list[Entry] = []
        self._credits = [0.0] * len(self._entries)

    def question(self, number: int, pruning: Pruning) -> Question:
        """The question of a number, counted from 0, at the run's pruning."""
        while len(self._turns) <= number:
            self._turns.append(self._next_turn())
        entry = self._turns[number]
        if entry.pruning_rate is not None or entry.method is not None:
            rate = pruning.rate if entry.pruning_rate is None else entry.pruning_rate
            pruning = Pruning(rate, entry.method or pruning.method)
        return Question(entry.parts, pruning, entry.max_new_tokens, self._unique)

    def _next_turn(self) -> Entry:
        """Adds each entry's weight to its credit, picks the largest credit and subtracts the sum of weights from it."""
        for index, entry in enumerate(self._entries):
            self._credits[index] += entry.weight
        richest = max(range(len(self._entries)), key=self._credits.__getitem__)
        self._credits[richest] -= sum(entry.weight for entry in self._entries)
        return self._entries[richest]


def _stamped(part: Part) -> Part:
    if not isinstance(part, Video) or (part.path is None and part.data is None):
        return part
    data = Path(part.path).read_bytes() if part.path is not None else part.data or b""
    return replace(part, path=None, data=stamped(data))


def synthesised(seed: int) -> list[Entry]:
    """Every clip of `clips(seed)` with each of QUESTIONS; consecutive entries have different kinds of clips."""
    films = clips(seed)
    return [Entry(user_turn(Video(data=film), text).parts) for text in QUESTIONS for film in films]


# --- files ------------------------------------------------------------------------------------------------------


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    video: str | None = Field(None, min_length=1)
    image: str | None = Field(None, min_length=1)
    url: str | None = Field(None, min_length=1)
    question: str = Field(min_length=1)
    pruning_rate: float | None = Field(None, ge=0, lt=1)
    method: Literal["evs", "evs_causal", "vidcom2", "vcast", "random", "pixel_change", "none"] | None = None
    max_new_tokens: int | None = Field(None, ge=1)
    weight: float = Field(1.0, gt=0)


def read_workload(path: Path, *, on_server: bool = False) -> list[Entry]:
    """The entries of a file: a ShareGPT file if it begins with `[` (see `read_sharegpt`), else JSON Lines.

    Of JSON Lines, blank lines are skipped. Each other one is an object with `question`, at most one of `video`,
    `image` (paths relative to the file's folder) and `url`, and optionally `pruning_rate`, `method`, `max_new_tokens`
    and `weight`, which override the run's settings; a line with a rate or a method of its own has no threshold.
    on_server: paths are below preprocessing's --media-root.
    Raises InvalidRequest naming line, field, value and limit, and OSError if the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path} must be UTF-8 text, byte {error.start} is invalid") from error
    if text.lstrip().startswith("["):
        return [Entry(parts) for parts in read_sharegpt(text, path, on_server=on_server)]
    entries = []
    for number, one in enumerate(text.split("\n"), start=1):
        if one.strip():
            place = f"{path}, line {number}"
            try:
                line = _Line.model_validate_json(one)
            except ValidationError as error:
                raise InvalidRequest(f"{place}: {_first(error)}") from error
            parts = user_turn(_media(line, place, path.parent, on_server), line.question).parts
            entries.append(Entry(parts, line.pruning_rate, line.method, line.max_new_tokens, line.weight))
    if not entries:
        raise InvalidRequest(f"{path} must have at least 1 line, got 0")
    return entries


def _first(error: ValidationError) -> str:
    found = error.errors()[0]
    if found["type"] == "extra_forbidden":
        return f"{found['loc'][0]}: unknown field, must be one of {', '.join(_Line.model_fields)}"
    return first_error(error)


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
    return file_of(kind, location, f"{place}: {given[0]}", folder, on_server)
