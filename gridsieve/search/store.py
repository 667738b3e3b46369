"""Where the vectors of a folder's moments are kept: three tables, in SQL that SQLite and Postgres both read.

    gridsieve_settings   how the vectors were made: one row
    gridsieve_films      path -> size, time of change, content hash, length: a row for each file that is complete
    gridsieve_moments    content hash, start, end -> vector, picture

Moments belong to contents, so a file that was copied or renamed has them, and a film that was not finished keeps those
that it has. The nearest vectors are found by comparing all of them: results are exact.
"""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gridsieve.common.contract.errors import Unavailable
from gridsieve.search.films import FilmFile, FilmMoment, Span

_TABLES = (
    "CREATE TABLE IF NOT EXISTS gridsieve_settings (settings TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS gridsieve_films (path TEXT PRIMARY KEY, size_bytes BIGINT NOT NULL, "
    "modified_ns BIGINT NOT NULL, digest TEXT NOT NULL, length_s DOUBLE PRECISION NOT NULL)",
    "CREATE TABLE IF NOT EXISTS gridsieve_moments (digest TEXT NOT NULL, start_s DOUBLE PRECISION NOT NULL, "
    "end_s DOUBLE PRECISION NOT NULL, vector {vector} NOT NULL, picture {picture} NOT NULL, "
    "PRIMARY KEY (digest, start_s, end_s))",
)


class Store(ABC):
    """Each call is one transaction. Raises Unavailable where the database fails."""

    _VECTOR_TYPE: str
    _BYTES_TYPE: str
    _HAS_TABLES: str
    """SQL that returns a row if the tables are there."""
    _DISTANCE: str
    """SQL for one minus the cosine of m.vector and the vector in its place `?`."""

    @abstractmethod
    def _run(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        """The rows of a statement, which has `?` where a value stands."""

    @abstractmethod
    def _vector(self, values: NDArray[np.float32]) -> Any:
        """A vector as it is given to the database."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def lock(self) -> bool:
        """Takes the store for an update, until `unlock` or the end of the process. Returns False if another has it."""

    @abstractmethod
    def unlock(self) -> None: ...

    @asynccontextmanager
    async def locked(self) -> AsyncIterator[None]:
        """One update at a time: the end of one drops moments that no film has. Raises Unavailable."""
        if not await asyncio.to_thread(self.lock):
            raise Unavailable("another update of this index has not ended", "store")
        try:
            yield
        finally:
            await asyncio.to_thread(self.unlock)

    def create(self) -> None:
        """Makes the tables, unless they are there."""
        for table in _TABLES:
            self._run(table.format(vector=self._VECTOR_TYPE, picture=self._BYTES_TYPE))

    def settings(self) -> dict[str, Any] | None:
        """How the vectors were made; None: there are none. It writes nothing, so a reader needs no right to write."""
        if not self._run(self._HAS_TABLES):
            return None
        rows = self._run("SELECT settings FROM gridsieve_settings")
        return dict(json.loads(rows[0][0])) if rows else None

    def set_settings(self, settings: Mapping[str, Any]) -> None:
        """Of a store without settings; others stay."""
        self._run(
            "INSERT INTO gridsieve_settings SELECT CAST(? AS TEXT) WHERE NOT EXISTS (SELECT 1 FROM gridsieve_settings)",
            json.dumps(settings),
        )

    def films(self) -> list[FilmFile]:
        """Those that are complete."""
        return [FilmFile(*row) for row in self._run("SELECT path, size_bytes, modified_ns FROM gridsieve_films")]

    def length_s(self, digest: str) -> float | None:
        """Of a film of this content that is complete."""
        rows = self._run("SELECT length_s FROM gridsieve_films WHERE digest = ?", digest)
        return float(rows[0][0]) if rows else None

    def add_film(self, film: FilmFile, digest: str, length_s: float) -> None:
        """All moments of this content are there."""
        values = (film.path, film.size_bytes, film.modified_ns, digest, length_s)
        self._run(
            "INSERT INTO gridsieve_films VALUES (?, ?, ?, ?, ?) ON CONFLICT (path) DO UPDATE SET "
            "size_bytes = excluded.size_bytes, modified_ns = excluded.modified_ns, digest = excluded.digest, "
            "length_s = excluded.length_s",
            *values,
        )

    def remove_film(self, path: str) -> None:
        self._run("DELETE FROM gridsieve_films WHERE path = ?", path)

    def has_moment(self, digest: str, span: Span) -> bool:
        rows = self._run(
            "SELECT 1 FROM gridsieve_moments WHERE digest = ? AND start_s = ? AND end_s = ?",
            *(digest, span.start_s, span.end_s),
        )
        return bool(rows)

    def add_moment(self, digest: str, span: Span, vector: NDArray[np.float32], picture: bytes) -> None:
        """vector: float32 [D]. picture: a frame of it, JPEG; empty: none could be decoded."""
        self._run(
            "INSERT INTO gridsieve_moments VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            *(digest, span.start_s, span.end_s, self._vector(vector), picture),
        )

    def picture(self, moment: FilmMoment) -> bytes:
        """A frame of it, JPEG; empty where it has none, or is not there any more."""
        rows = self._run(
            "SELECT m.picture FROM gridsieve_films f JOIN gridsieve_moments m USING (digest) "
            "WHERE f.path = ? AND m.start_s = ? AND m.end_s = ?",
            *(moment.path, moment.start_s, moment.end_s),
        )
        return bytes(rows[0][0]) if rows else b""

    def drop_moments_but(self, digests: Sequence[str]) -> None:
        """Drops moments of contents that neither are named nor belong to a film."""
        named = f"digest NOT IN ({', '.join('?' * len(digests))}) AND " if digests else ""
        self._run(
            f"DELETE FROM gridsieve_moments WHERE {named}digest NOT IN (SELECT digest FROM gridsieve_films)",  # noqa: S608  (of values, only `?` is in it)
            *digests,
        )

    def moments(self) -> list[FilmMoment]:
        """All of them, by path and time."""
        rows = self._run(
            "SELECT f.path, m.start_s, m.end_s FROM gridsieve_films f JOIN gridsieve_moments m USING (digest) "
            "ORDER BY f.path, m.start_s"
        )
        return [FilmMoment(*row) for row in rows]

    def nearest(self, vector: NDArray[np.float32], limit: int) -> list[FilmMoment]:
        """So many moments, the nearest first. vector: float32 [D]."""
        rows = self._run(
            f"SELECT f.path, m.start_s, m.end_s, 1 - ({self._DISTANCE}) AS score "  # noqa: S608  (of the class, no value)
            "FROM gridsieve_films f JOIN gridsieve_moments m USING (digest) "
            "ORDER BY score DESC, f.path, m.start_s LIMIT ?",
            *(self._vector(vector), limit),
        )
        return [FilmMoment(*row) for row in rows]
