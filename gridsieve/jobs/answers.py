"""The output of a job, which is its state: a request whose row it has is never asked again."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from gridsieve.common.contract.errors import StartupError
from gridsieve.jobs.lines import ROW_BEGINS, Row


class Answers:
    """done: the custom_id of every row. See `opened`."""

    def __init__(self, file: IO[bytes], done: set[str]) -> None:
        self._file = file
        self.done = done

    def write(self, row: Row) -> None:
        """Appends a row. Raises OSError."""
        self._file.write(json.dumps(row, separators=(",", ":")).encode() + b"\n")
        self._file.flush()
        self.done.add(row["custom_id"])


@contextmanager
def opened(path: Path) -> Iterator[Answers]:
    """The output at a path, which may have rows of an earlier run. What that run had written of a row when it was
    killed is removed.

    Raises StartupError if another run writes it, or if it has lines that are no rows; OSError.
    """
    with path.open("a+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartupError(f"{path} is the output of a run that has not ended") from None
        yield Answers(file, _read(path, file))


def _read(path: Path, file: IO[bytes]) -> set[str]:
    done: set[str] = set()
    end, is_whole = 0, True
    file.seek(0)
    for number, data in enumerate(file, start=1):
        is_whole = data.endswith(b"\n")
        if (custom_id := _id_in(data)) is not None:
            done.add(custom_id)
        elif is_whole or not _begins_row(data):
            raise StartupError(f"{path}: line {number} is no row of a batch: is it another file?")
        else:
            file.truncate(end)
            return done
        end += len(data)
    if not is_whole:
        file.write(b"\n")
    return done


def _begins_row(data: bytes) -> bool:
    """Whether a run may have written these bytes before it was killed."""
    return data.startswith(ROW_BEGINS[: len(data)])


def _id_in(data: bytes) -> str | None:
    """The custom_id of a row; None for what is no row."""
    try:
        row: Any = json.loads(data)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and {"custom_id", "response", "error"} <= row.keys()
    return row["custom_id"] if is_row and isinstance(row["custom_id"], str) else None
