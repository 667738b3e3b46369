"""What a job asks: the lines of a file, or one question about each file of a folder."""

from __future__ import annotations

import base64
import mimetypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.media_files import kind_of
from gridsieve.jobs.lines import CHAT, Line, line_of, read_line


class WrongLine(InvalidRequest):
    """A line of a file is no request. line: its number, from 1. param: the field that is wrong."""

    def __init__(self, line: int, error: InvalidRequest) -> None:
        super().__init__(f"line {line}: {error}")
        self.line = line
        self.param = error.field


class Requests(Protocol):
    """Requests by their number, 0 to len(ids) - 1. ids: the custom_id of each, all different."""

    @property
    def ids(self) -> Sequence[str]: ...

    def size_bytes(self, number: int) -> int:
        """Of the request's body, about. Raises OSError."""

    def line(self, number: int) -> Line:
        """Blocks on the disk. Raises InvalidRequest, OSError."""


@dataclass(frozen=True, slots=True)
class FileRequests:
    """The lines of a file, which are read again when they are asked: they may have clips in base64.

    places: of each line in the file, [start, end) in bytes.
    """

    path: Path
    ids: Sequence[str]
    places: Sequence[tuple[int, int]]

    @classmethod
    def read(cls, path: Path, url: str | None = None, most: int | None = None, most_bytes: int | None = None) -> Self:
        """url: of every line; None: any. most, most_bytes: how many lines, and bytes of a line; None: any number.

        Raises WrongLine for the first line that is no request, or has the custom_id of another, InvalidRequest where
        there is no line, OSError.
        """
        numbers: dict[str, int] = {}
        places: list[tuple[int, int]] = []
        with path.open("rb") as file:
            end = 0
            lines = iter(lambda: file.readline(-1 if most_bytes is None else most_bytes + 1), b"")
            for number, data in enumerate(lines, start=1):
                start, end = end, end + len(data)
                if not data.strip():
                    continue
                try:
                    if most_bytes is not None and len(data) > most_bytes:
                        raise InvalidRequest(f"has more than {most_bytes} bytes, the most of a request")
                    line = read_line(data)
                    if url not in (None, line.url):
                        raise InvalidRequest(field="url", limit=url, value=line.url)
                    if (other := numbers.setdefault(line.custom_id, number)) != number:
                        raise InvalidRequest(f"{line.custom_id!r} is that of line {other}, too", field="custom_id")
                    if most is not None and len(numbers) > most:
                        raise InvalidRequest(f"at most {most} requests are allowed")
                except InvalidRequest as error:
                    raise WrongLine(number, error) from None
                places.append((start, end))
        if not numbers:
            raise InvalidRequest("there is no request in the file")
        return cls(path, tuple(numbers), places)

    def size_bytes(self, number: int) -> int:
        start, end = self.places[number]
        return end - start

    def line(self, number: int) -> Line:
        start, end = self.places[number]
        with self.path.open("rb") as file:
            file.seek(start)
            return read_line(file.read(end - start))


@dataclass(frozen=True, slots=True)
class FolderRequests:
    """A question about each video, image and sound below a folder, in the order of their paths, which are their ids.

    fields: of every body, beside its messages. on_server: files are named by their file: URL, for a gateway whose
    preprocessing has the folder below its --media-root; otherwise bodies have the files.
    """

    folder: Path
    question: str
    fields: dict[str, Any] = field(default_factory=dict)
    on_server: bool = False
    ids: Sequence[str] = ()

    @classmethod
    def find(cls, folder: Path, question: str, fields: dict[str, Any], on_server: bool) -> Self:
        """Raises InvalidRequest where there is no folder, or nothing in it."""
        if not folder.is_dir():
            raise InvalidRequest(f"--folder {folder} is no folder")
        found = (path for path in folder.rglob("*") if kind_of(path) and path.is_file())
        ids = sorted(path.relative_to(folder).as_posix() for path in found)
        if not ids:
            raise InvalidRequest(f"--folder {folder} has no video, image or sound, by the endings of their names")
        return cls(folder, question, fields, on_server, ids)

    def size_bytes(self, number: int) -> int:
        return 0 if self.on_server else (self.folder / self.ids[number]).stat().st_size * 4 // 3

    def line(self, number: int) -> Line:
        path = (self.folder / self.ids[number]).absolute()
        if self.on_server:
            url = path.as_uri()
        else:
            kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
            url = f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
        part = f"{kind_of(path)}_url"
        content = [{"type": part, part: {"url": url}}, {"type": "text", "text": self.question}]
        return line_of(self.ids[number], CHAT, {"messages": [{"role": "user", "content": content}], **self.fields})
