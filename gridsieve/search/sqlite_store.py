"""A store in one file beside the films: SQLite with the distances of sqlite-vec.

APSW brings a SQLite of its own: that of many builds of Python loads no extensions.
"""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path
from typing import Any

import apsw
import numpy as np
import sqlite_vec
from numpy.typing import NDArray

from gridsieve.common.contract.errors import Unavailable
from gridsieve.search.store import Store

_BUSY_MS = 10_000  # for another process that writes


class SqliteStore(Store):
    """path: of the file, which is made with its folder. Raises OSError, or Unavailable for what is no database."""

    _VECTOR_TYPE = _BYTES_TYPE = "BLOB"
    _HAS_TABLES = "SELECT 1 FROM sqlite_master WHERE name = 'gridsieve_settings'"
    _DISTANCE = "vec_distance_cosine(m.vector, ?)"

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        self._path = path
        self._running = threading.Lock()  # APSW refuses a connection that another thread uses
        try:
            self._connection = apsw.Connection(str(path))
        except apsw.Error as error:
            raise self._failed(error) from error
        self._connection.set_busy_timeout(_BUSY_MS)
        self._connection.enable_load_extension(True)
        self._connection.load_extension(sqlite_vec.loadable_path())
        self._connection.enable_load_extension(False)

    def _run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        try:
            with self._running:
                return self._connection.execute(sql, values).fetchall()
        except apsw.Error as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> Unavailable:
        return Unavailable(f"the store {self._path} fails: {error}", "store")

    def _vector(self, values: NDArray[np.float32]) -> bytes:
        return values.astype("<f4").tobytes()

    def lock(self) -> bool:
        self._lock = self._path.with_suffix(".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            return False
        return True

    def unlock(self) -> None:
        self._lock.close()

    def close(self) -> None:
        with self._running:
            self._connection.close()
