"""A file of cameras: what is watched, what is asked, and where the answers go, with the secrets that it names.

    [[camera]]                                      [[question]]                        [[sink]]
    name = "yard"                                   text = "Is a person there?"         type = "webhook"
    url = "rtsp://yard.lan/stream"                  every_s = 5                         url = "https://…"
    user = "viewer"
    password_file = "yard.password"

Errors name the file, the table, the key, the value and the limit, and never show a secret.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import SplitResult, quote, urlsplit

from gridsieve.client.live_events import Snapshots
from gridsieve.client.prompt import LiveOptions, Pruning, Sampling, Trigger
from gridsieve.common.contract.errors import StartupError
from gridsieve.watch.tables import (
    CameraTable,
    File,
    Login,
    MqttTable,
    QuestionTable,
    StdoutTable,
    WebhookTable,
    parsed,
    place_of,
)

_MAX_QUESTIONS = 16  # of a live session
_SCHEMES = ("rtsp", "rtsps", "http", "https")
_MQTT_PORT, _MQTTS_PORT = 1883, 8883
_VISIBLE = re.compile(r"[!-~]+")
_KEY_BYTES = (24, 64)  # of Standard Webhooks


@dataclass(frozen=True, slots=True)
class Camera:
    """A camera, and what is asked about it. Those that are equal are watched alike.

    address: its URL, to be shown: without user name, password and query. options: of its live session.
    """

    name: str
    address: str
    questions: tuple[Trigger, ...]
    options: LiveOptions = field(repr=False)


@dataclass(frozen=True, slots=True)
class Stdout:
    snapshot: bool = False


@dataclass(frozen=True, slots=True)
class Webhook:
    """secret: as Standard Webhooks writes it, whsec_ and base64; None: events are not signed."""

    url: str = field(repr=False)
    secret: str | None = field(repr=False)
    snapshot: bool


@dataclass(frozen=True, slots=True)
class Mqtt:
    """topic: with {camera} for the name of the camera."""

    host: str
    port: int
    topic: str
    tls: bool
    user: str | None
    password: str | None = field(repr=False)
    snapshot: bool


Sink: TypeAlias = Stdout | Webhook | Mqtt


Stamp: TypeAlias = tuple[int, ...]
"""Of a file: another one after each change."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What a file says. files: that file, and those with secrets and schemas that it names, as they were then."""

    cameras: tuple[Camera, ...]
    sinks: tuple[Sink, ...]
    files: Mapping[Path, Stamp]


def read(path: Path) -> Watched:
    """Reads a file of cameras, and the files and variables that it names. Raises StartupError for what is wrong."""
    return _Reading(path).watched()


def stamped(paths: Iterable[Path]) -> dict[Path, Stamp]:
    """The stamps that files have now; empty ones where there is no file."""
    stamps: dict[Path, Stamp] = {}
    for path in paths:
        stamps[path] = ()
        with suppress(OSError):
            told = path.stat()
            stamps[path] = (told.st_ino, told.st_size, told.st_mtime_ns)
    return stamps


class _Reading:
    """Paths in the file are relative to its folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[Path, Stamp] = {}
        self._file: File = parsed(str(path), self._text(path, str(path)))

    def watched(self) -> Watched:
        tables = self._file.camera
        names = [each.name for each in tables]
        for number, name in enumerate(names):
            if name in names[:number]:
                raise self._error(place_of("camera", number, name), "name must be unique")
        sinks = tuple(self._sink(number, each) for number, each in enumerate(self._file.sink))
        asked = [self._question(number, each, names) for number, each in enumerate(self._file.question)]
        snapshots = any(each.snapshot for each in sinks)
        cameras = []
        for number, table in enumerate(tables):
            questions = tuple(each for of, each in asked if table.name in of)
            cameras.append(self._camera(place_of("camera", number, table.name), table, questions, snapshots))
        return Watched(tuple(cameras), sinks, self._files)

    def _camera(self, where: str, table: CameraTable, questions: tuple[Trigger, ...], snapshots: bool) -> Camera:
        if not 1 <= len(questions) <= _MAX_QUESTIONS:
            raise self._error(where, f"must be asked 1 to {_MAX_QUESTIONS} questions, got {len(questions)}")
        url, address = self._url(where, table)
        threshold = self._of(table, "pruning_threshold")
        options = LiveOptions(
            source=url,
            source_name=table.name,
            reopens=True,
            snapshots=Snapshots.ANSWERS if snapshots else None,
            triggers=questions,
            pruning=None if threshold is None else Pruning(threshold=threshold),
            fps=self._of(table, "fps"),
            max_pixels=self._of(table, "max_pixels"),
            window_tokens=self._of(table, "window_tokens"),
            answer_tokens=self._of(table, "answer_tokens"),
            window_s=self._of(table, "window_s"),
            system=self._of(table, "system"),
        )
        return Camera(table.name, address, questions, options)

    def _of(self, table: CameraTable, name: str) -> Any:
        """What a camera says, or the top of the file does."""
        own = getattr(table, name)
        return getattr(self._file, name) if own is None else own

    def _question(self, number: int, table: QuestionTable, names: list[str]) -> tuple[list[str], Trigger]:
        """The cameras that a question is asked about, and the question."""
        where = place_of("question", number)
        if table.every_s is None and table.on_change is None:
            raise self._error(where, "every_s or on_change must be set")
        for name in table.cameras or ():
            if name not in names:
                raise self._error(where, f"cameras must name some of {', '.join(names)}, got {name!r}")
        sampling = Sampling(max_new_tokens=table.max_new_tokens)
        if table.json_schema is not None:
            sampling["json_schema"] = self._schema(where, table.json_schema)
        question = Trigger(table.text, every_s=table.every_s, on_change=table.on_change, sampling=sampling)
        return table.cameras or names, question

    def _schema(self, where: str, given: dict[str, Any] | str) -> dict[str, Any]:
        if isinstance(given, str):
            try:
                given = json.loads(self._text(self._path.parent / given, f"{where}: schema"))
            except json.JSONDecodeError as error:
                raise self._error(where, f"schema {given} is not JSON: {error}") from None
        if not isinstance(given, dict):
            raise self._error(where, "schema must be an object of JSON schema")
        return given

    def _url(self, where: str, table: CameraTable) -> tuple[str, str]:
        """The camera's URL with its user name and password, and without."""
        parts = self._split(where, "url", table.url, _SCHEMES)
        _, _, place = parts.netloc.rpartition("@")
        address = f"{parts.scheme}://{place}{parts.path}"  # a query may hold a password
        has_password = table.password_file is not None or table.password_env is not None
        if parts.username is not None:
            if has_password or table.user is not None:
                raise self._error(where, "user and password must not be set beside those in url")
            return table.url, address
        login = self._login(where, table if has_password else self._file, self._of(table, "user"))
        return (parts._replace(netloc=f"{login}@{place}").geturl() if login else table.url), address

    def _split(self, where: str, key: str, url: str, schemes: tuple[str, ...]) -> SplitResult:
        try:
            parts = urlsplit(url)
            if parts.scheme in schemes and parts.hostname and parts.port != 0 and _VISIBLE.fullmatch(url):
                return parts
        except ValueError:
            pass
        known = " or ".join(f"{each}://" for each in schemes)
        raise self._error(where, f"{key} must be {known} with a host, got {url.partition(':')[0]}:…")

    def _login(self, where: str, table: Login, user: str | None) -> str:
        """user:password, percent-encoded; empty without a user."""
        password = self._secret(where, table, "password")
        if password is None:
            return quote(user, safe="") if user else ""
        if user is None:
            raise self._error(where, "user must be set beside a password")
        return f"{quote(user, safe='')}:{quote(password, safe='')}"

    def _sink(self, number: int, table: StdoutTable | WebhookTable | MqttTable) -> Sink:
        where = place_of("sink", number, table.type)
        match table:
            case StdoutTable():
                return Stdout(table.snapshot)
            case MqttTable():
                password = self._secret(where, table, "password")
                if password is not None and table.user is None:
                    raise self._error(where, "user must be set beside a password")
                port = table.port or (_MQTTS_PORT if table.tls else _MQTT_PORT)
                return Mqtt(table.host, port, table.topic, table.tls, table.user, password, table.snapshot)
        url = self._secret(where, table, "url", table.url)
        if url is None:
            raise self._error(where, "url, url_file or url_env must be set")
        self._split(where, "url", url, ("https", "http"))
        secret = self._secret(where, table, "secret")
        if secret is not None and not _is_key(secret):
            low, high = _KEY_BYTES
            limit = f"must be base64 of {low} to {high} bytes, as `openssl rand -base64 32` prints it"
            raise self._error(where, f"secret {limit}")
        return Webhook(url, secret, table.snapshot)

    def _secret(self, where: str, table: Any, key: str, written: str | None = None) -> str | None:
        """What a file or a variable holds, or the table itself; None if nothing is named."""
        file, variable = getattr(table, f"{key}_file"), getattr(table, f"{key}_env")
        if sum(each is not None for each in (file, variable, written)) > 1:
            raise self._error(where, f"{key} must have one place, got several")
        if variable is not None:
            found = os.environ.get(variable, "")
            if not found:
                raise self._error(where, f"{key}_env names the variable {variable}, which is not set")
            if not found.isprintable():  # bytes that are no UTF-8 are surrogates here
                raise self._error(where, f"{key}_env names the variable {variable}, which must hold one line of UTF-8")
            return found
        if file is None:
            return written
        found = self._text(self._path.parent / file, f"{where}: {key}_file").strip("\r\n")
        if not found or "\n" in found:
            raise self._error(where, f"{key}_file {file} must hold one line")
        return found

    def _text(self, path: Path, what: str) -> str:
        self._files = stamped([path]) | self._files  # before it is read
        try:
            return path.read_text(encoding="utf-8")
        except OSError as error:
            reason = error.strerror
        except UnicodeDecodeError:
            reason = "it must be UTF-8 text"
        if path == self._path:
            raise StartupError(f"{path}: {reason}")
        raise StartupError(f"{self._path}: {what} {path} cannot be read: {reason}")

    def _error(self, where: str, text: str) -> StartupError:
        return StartupError(f"{self._path}: {where}: {text}")


def _is_key(secret: str) -> bool:
    try:
        size = len(base64.b64decode(secret.removeprefix("whsec_"), validate=True))
    except ValueError:
        return False
    return _KEY_BYTES[0] <= size <= _KEY_BYTES[1]
