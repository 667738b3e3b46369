"""A store in a Postgres with pgvector, for more moments than one machine compares in time, and for several readers."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import psycopg
from numpy.typing import NDArray

from gridsieve.common.contract.errors import Unavailable
from gridsieve.search.store import Store

_LOCK = 0x6772_6964  # of a database


class PostgresStore(Store):
    """url: of libpq, postgresql://user@host/database. Raises Unavailable if the database or pgvector is missing.

    A connection that was lost fails one call; the next one opens another.
    """

    _VECTOR_TYPE = "vector"
    _BYTES_TYPE = "bytea"
    _HAS_TABLES = "SELECT 1 WHERE to_regclass('gridsieve_settings') IS NOT NULL"
    _DISTANCE = "m.vector <=> ?::vector"

    def __init__(self, url: str) -> None:
        self._url = url
        self._running = threading.Lock()  # threads that find the connection lost open one together
        self._connection = self._opened()

    def create(self) -> None:
        self._run("CREATE EXTENSION IF NOT EXISTS vector")
        super().create()

    def _run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._running:
            if self._connection.closed:
                self._connection = self._opened()
            try:
                cursor = self._connection.execute(sql.replace("?", "%s").encode(), values)
                return cursor.fetchall() if cursor.description else []
            except psycopg.Error as error:
                raise _failed(error) from error

    def _opened(self) -> psycopg.Connection[tuple[Any, ...]]:
        try:
            return psycopg.connect(self._url, autocommit=True)
        except psycopg.Error as error:
            raise _failed(error) from error

    def _vector(self, values: NDArray[np.float32]) -> str:
        return str(values.tolist())

    def lock(self) -> bool:
        return bool(self._run("SELECT pg_try_advisory_lock(?)", _LOCK)[0][0])

    def unlock(self) -> None:
        self._run("SELECT pg_advisory_unlock(?)", _LOCK)

    def close(self) -> None:
        self._connection.close()


def _failed(error: Exception) -> Unavailable:
    return Unavailable(f"the store fails: {' '.join(str(error).split())}", "store")
