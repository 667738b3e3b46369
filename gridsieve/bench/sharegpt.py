"""Reads questions from a ShareGPT file: a JSON list of conversations, with the paths or URLs of their media.

    [{"conversations": [{"from": "human", "value": "<video>\\nWhat moves?"}, {"from": "gpt", "value": "A circle."}],
      "video": "clips/0001.mp4"}]

Source: what `vllm bench serve --dataset-name sharegpt` reads, and the data of LLaVA and ShareGPT4Video, whose
placeholders `<image>` and `<video>` say where in the text a medium belongs.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from gridsieve.client.prompt import Image, Part, Text, Video, is_url
from gridsieve.common.contract.errors import InvalidRequest

_MAX_VALUE_CHARACTERS = 60
_QUESTIONERS = ("human", "user")
_PLACEHOLDER = re.compile(r"<(image|video)>")


class _Turn(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    speaker: str = Field(alias="from")
    value: str


class _Conversation(BaseModel):
    """Other fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)

    conversations: list[_Turn] = []
    image: str | list[str] = []
    video: str | list[str] = []


_FILE = TypeAdapter(list[_Conversation])


def read_sharegpt(text: str, path: Path, *, on_server: bool) -> list[tuple[Part, ...]]:
    """The user's turn of each conversation: the first turn of a human, with its media.

    A medium stands in place of its placeholder; media without one precede the text. Conversations of fewer than two
    turns are skipped, as vLLM does, and those without a human. Further turns, and the length of the recorded reply,
    are ignored.
    path: of the file; media paths are relative to its folder. on_server: they are below preprocessing's --media-root.
    Raises InvalidRequest naming entry, field, value and limit.
    """
    try:
        conversations = _FILE.validate_json(text)
    except ValidationError as error:
        raise InvalidRequest(f"{path}: {first_error(error)}") from error
    asked = []
    for number, each in enumerate(conversations):
        questions = [turn.value for turn in each.conversations if turn.speaker in _QUESTIONERS]
        if len(each.conversations) > 1 and questions:
            asked.append(_parts(each, questions[0], f"{path}: {number}", path.parent, on_server))
    if not asked:
        raise InvalidRequest(f"{path} must have at least 1 conversation of two turns with one of a human, got 0")
    return asked


def _parts(entry: _Conversation, question: str, place: str, folder: Path, on_server: bool) -> tuple[Part, ...]:
    media: dict[str, list[Part]] = {}
    for name, kind in (("image", Image), ("video", Video)):
        given = getattr(entry, name)
        locations = [given] if isinstance(given, str) else given
        media[name] = [_medium(kind, each, f"{place}.{name}", folder, on_server) for each in locations]
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


def _medium(kind: type[Image | Video], location: str, place: str, folder: Path, on_server: bool) -> Image | Video:
    path = location.removeprefix("file://")
    if is_url(path):
        return kind(url=path)
    return file_of(kind, path, place, folder, on_server)


def file_of(kind: type[Image | Video], location: str, place: str, folder: Path, on_server: bool) -> Image | Video:
    """The medium at a path: relative to the folder, or on_server, below preprocessing's --media-root.

    place: where the path stands, for the error. Raises InvalidRequest for a file that does not exist here.
    """
    if on_server:
        return kind(server_path=location)
    if not (folder / location).is_file():
        raise InvalidRequest(f"{place}: must name a file, got {location!r}, which does not exist")
    return kind(folder / location)


def first_error(error: ValidationError) -> str:
    """Field, limit and value of the first error."""
    found = error.errors()[0]
    field = ".".join(map(str, found["loc"]))
    if found["type"] == "missing":
        return f"{field}: {found['msg']}"
    value = repr(found["input"])
    shown = value if len(value) <= _MAX_VALUE_CHARACTERS else f"{value[:_MAX_VALUE_CHARACTERS]}…"
    return f"{field + ': ' if field else ''}{found['msg']}, got {shown}"
