"""The questions of a load: those of a ShareGPT file, or questions about synthetic clips.

    [{"conversations": [{"from": "human", "value": "<video>\\nWhat moves?"}, {"from": "gpt", "value": "A circle."}],
      "video": "clips/0001.mp4"}]

It knows nothing of when requests are sent, or of their results. Source: what `vllm bench serve --dataset-name sharegpt`
reads, and the data of LLaVA and ShareGPT4Video, whose placeholders `<image>` and `<video>` say where in the text a
medium belongs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gridsieve.bench.clips import clips, stamped
from gridsieve.client.prompt import Image, Part, Text, Video, is_url, user_turn
from gridsieve.common.contract.errors import InvalidRequest

Parts: TypeAlias = tuple[Part, ...]
"""A question: the user's turn."""

_MAX_VALUE_CHARACTERS = 60
_QUESTIONS = ("What moves?", "What happens?", "How many objects are there?")
_QUESTIONERS = ("human", "user")
_PLACEHOLDER = re.compile(r"<(image|video)>")


@dataclass(frozen=True, slots=True)
class Workload:
    """Questions, asked in order and again from the first.

    has_new_bytes: whether each mp4 file that is sent gets other bytes, so that it never hits a cache.
    """

    questions: tuple[Parts, ...]
    has_new_bytes: bool = False

    def question(self, number: int) -> Parts:
        """The question of a number, counted from 0. With new bytes it reads files, and raises OSError for one that is
        gone."""
        parts = self.questions[number % len(self.questions)]
        return tuple(map(_with_new_bytes, parts)) if self.has_new_bytes else parts


def _with_new_bytes(part: Part) -> Part:
    if not isinstance(part, Video) or (part.path is None and part.data is None):
        return part
    data = Path(part.path).read_bytes() if part.path is not None else part.data or b""
    return replace(part, path=None, data=stamped(data))


def synthetic_questions() -> tuple[Parts, ...]:
    """Every clip of `clips` with each question; consecutive ones are about different kinds of clips."""
    films = clips()
    return tuple(user_turn(Video(data=film), text).parts for text in _QUESTIONS for film in films)


# --- ShareGPT ---------------------------------------------------------------------------------------------------


class _Turn(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    speaker: str = Field(alias="from")
    value: str


class _Entry(BaseModel):
    """Other fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)

    conversations: list[_Turn] = []
    image: str | list[str] = []
    video: str | list[str] = []


_FILE = TypeAdapter(list[_Entry])


def read_sharegpt(path: Path) -> tuple[Parts, ...]:
    """The first turn of a human in each conversation, with its media: paths relative to the file's folder, or URLs.

    Each media item takes the place of its placeholder; items without a placeholder come before the text.
    Conversations of fewer than two turns are skipped, as vLLM does, and those without a human. Further turns, and the
    length of the recorded reply, are ignored.
    Raises InvalidRequest naming entry, field, value and limit, and OSError if the file cannot be read.
    """
    try:
        entries = _FILE.validate_json(path.read_bytes())
    except ValidationError as error:
        raise InvalidRequest(f"{path}: {_first(error)}") from error
    questions = []
    for number, entry in enumerate(entries):
        asked = [turn.value for turn in entry.conversations if turn.speaker in _QUESTIONERS]
        if len(entry.conversations) > 1 and asked:
            questions.append(_parts(entry, asked[0], f"{path}: {number}", path.parent))
    if not questions:
        raise InvalidRequest(f"{path} must have at least 1 conversation of two turns with one of a human, got 0")
    return tuple(questions)


def _parts(entry: _Entry, question: str, place: str, folder: Path) -> Parts:
    media: dict[str, list[Part]] = {}
    for name, kind in (("image", Image), ("video", Video)):
        given = getattr(entry, name)
        locations = [given] if isinstance(given, str) else given
        media[name] = [_medium(kind, each, f"{place}.{name}", folder) for each in locations]
    parts: list[Part] = []
    text = ""
    for index, piece in enumerate(_PLACEHOLDER.split(question)):  # text, name of a placeholder, text, ...
        if index % 2 == 0:
            text += piece
        elif not media[piece]:
            text += f"<{piece}>"  # plain text
        else:
            parts += [*_text(text), media[piece].pop(0)]
            text = ""
    return (*media["image"], *media["video"], *parts, *_text(text))


def _text(text: str) -> list[Part]:
    """Without the line breaks that separate it from media."""
    return [Text(text.strip())] if text.strip() else []


def _medium(kind: type[Image | Video], location: str, place: str, folder: Path) -> Image | Video:
    """place: where the location stands, for the error. Raises InvalidRequest for a file that does not exist here."""
    if is_url(location):
        return kind(url=location)
    if not (folder / location).is_file():
        raise InvalidRequest(f"{place}: must name a file, got {location!r}, which does not exist")
    return kind(folder / location)


def _first(error: ValidationError) -> str:
    """Field, limit and value of the first error."""
    found = error.errors()[0]
    field = ".".join(map(str, found["loc"]))
    if found["type"] == "missing":
        return f"{field}: {found['msg']}"
    value = repr(found["input"])
    shown = value if len(value) <= _MAX_VALUE_CHARACTERS else f"{value[:_MAX_VALUE_CHARACTERS]}…"
    return f"{field + ': ' if field else ''}{found['msg']}, got {shown}"
