"""The tables of a file of cameras as TOML has them: which keys there are, and the range of each.

It reads nothing but the text that it is given; `cameras` reads what the keys name.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from gridsieve.common.contract.errors import StartupError

_VALUE_CHARACTERS = 80
_NAME = re.compile(r"[^\x00-\x1f\x7f/+#]{1,64}")
_HOST = re.compile(r"[\w.:-]+")
_LOGIN = re.compile(r"//[^/?#]*@")


def _not_blank(text: str) -> str:
    if text.strip():
        return text
    raise ValueError("must not be blank")


def _is_name(text: str) -> str:
    if _NAME.fullmatch(text) and text.strip():
        return text
    raise ValueError("must be 1 to 64 characters without /, + and #")


def _is_host(text: str) -> str:
    if _HOST.fullmatch(text):
        text.encode("idna")
        return text
    raise ValueError("must be a name or an address")


Text: TypeAlias = Annotated[str, AfterValidator(_not_blank)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Login(_Table):
    """A user name, and where its password is: in a file, or in a variable of the environment."""

    user: Text | None = None
    password_file: Text | None = None
    password_env: Text | None = None


class Shared(Login):
    """What holds for a camera, or at the top of the file for all that do not say their own. As in `LiveOptions`."""

    fps: float | None = Field(None, gt=0, le=60)
    max_pixels: int | None = Field(None, ge=1)
    pruning_threshold: float | None = Field(None, ge=0, lt=1)
    window_tokens: int | None = Field(None, ge=16)
    answer_tokens: int | None = Field(None, ge=16)
    window_s: float | None = Field(None, gt=0)
    system: Text | None = None


class CameraTable(Shared):
    """[[camera]]. Its name may be a part of MQTT's topics."""

    name: Annotated[str, AfterValidator(_is_name)]
    url: Text


class QuestionTable(_Table):
    """[[question]]. json_schema: a table, or the path of a file. cameras: None, all."""

    text: Text
    every_s: float | None = Field(None, gt=0)
    on_change: float | None = Field(None, gt=0, le=1)
    json_schema: dict[str, Any] | Text | None = Field(None, alias="schema")
    max_new_tokens: int | None = Field(None, ge=1)
    cameras: Annotated[list[Text], Field(min_length=1)] | None = None


class StdoutTable(_Table):
    """[[sink]] of the type stdout. snapshot, of each sink: whether events carry a picture of what was seen."""

    type: Literal["stdout"]
    snapshot: bool = False


class WebhookTable(_Table):
    """[[sink]] of the type webhook. The URL may be a secret as well."""

    type: Literal["webhook"]
    url: Text | None = None
    url_file: Text | None = None
    url_env: Text | None = None
    secret_file: Text | None = None
    secret_env: Text | None = None
    snapshot: bool = False


class MqttTable(Login):
    """[[sink]] of the type mqtt."""

    type: Literal["mqtt"]
    host: Annotated[Text, AfterValidator(_is_host)]
    port: int | None = Field(None, ge=1, le=65535)
    topic: Annotated[str, Field(pattern=r"^[^+#\x00]+$")] = "gridsieve/{camera}"
    tls: bool = False
    snapshot: bool = False


class File(Shared):
    camera: list[CameraTable] = Field(min_length=1)
    question: list[QuestionTable] = Field(min_length=1)
    sink: list[Annotated[StdoutTable | WebhookTable | MqttTable, Field(discriminator="type")]] = []


_TABLES = ("camera", "question", "sink")
_KINDS: dict[str, type[_Table]] = {
    "camera": CameraTable,
    "question": QuestionTable,
    "stdout": StdoutTable,
    "webhook": WebhookTable,
    "mqtt": MqttTable,
}


def parsed(name: str, text: str) -> File:
    """The file. name: of the file, for errors. Raises StartupError for every wrong key at once."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StartupError(f"{name} is not TOML: {error}") from None
    try:
        return File.model_validate(tables)
    except ValidationError as error:
        wrong = [_wrong(each, tables) for each in error.errors(include_url=False)]
        raise StartupError("\n".join(f"{name}: {each}" for each in wrong)) from None


def place_of(kind: str, number: int, name: object = None) -> str:
    """A table in errors, counted from 1: camera 2 (yard)."""
    return f"{kind} {number + 1}" + (f" ({name})" if isinstance(name, str) else "")


def _wrong(error: ErrorDetails, tables: dict[str, Any]) -> str:
    """Table, key, limit and value. What may be a secret is not shown: values of unknown keys, whole tables and lists,
    and logins in URLs."""
    steps, kind = list(error["loc"]), ""
    where = ""
    match steps:
        case [str(kind), int(number), *_]:
            named = tables[kind][number]
            where = place_of(kind, number, named.get("name") if isinstance(named, dict) else None)
            del steps[:2]
            if kind == "sink" and steps:
                kind = str(steps.pop(0))
    key = ".".join(map(str, steps))
    before = ": ".join(filter(None, (where, key)))
    match error["type"]:
        case "missing":
            return f"{before} must be set"
        case "extra_forbidden":
            return f"{before} is not known here; known are {', '.join(_keys(_KINDS.get(kind, File)))}"
        case "union_tag_invalid" | "union_tag_not_found":
            return f"{before}: type must be stdout, webhook or mqtt"
        case "list_type" if before in _TABLES:
            return f"{before} must be written as [[{before}]]"
    limit = re.sub(r"^(\w+ should|Value error, must)", "must", error["msg"])
    given = error["input"]
    return f"{before} {limit}" + ("" if isinstance(given, (dict, list)) else f", got {_shown(given)}")


def _keys(table: type[BaseModel]) -> Iterator[str]:
    for name, field in table.model_fields.items():
        yield field.alias or name


def _shown(value: object) -> str:
    text = _LOGIN.sub("//", repr(value)).partition("?")[0]
    return text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}…"
