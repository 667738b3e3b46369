"""One update of an index: vectors of the moments of new and changed films.

    film      | read ||        read        || read |          one at a time
    moments          |m|m|m|m|   |m|m|m|m|m|m|   |m|m|        embedded meanwhile, AT_ONCE at a time

A film is complete, and found by searches, once all its moments are stored. Moments of other films stay after an error.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gridsieve.client.client import GridsieveClient
from gridsieve.client.messages import IN_PYTHON
from gridsieve.client.prompt import FrameOptions, ReadOptions
from gridsieve.client.vectors import together
from gridsieve.common.contract.errors import InvalidRequest, MediaDamaged, MediaRejected, PromptTooLong
from gridsieve.common.contract.plan import KEYFRAMES
from gridsieve.moments.films import CutFilm, CutSpan, cut_film, digest_of, film_files, named_films
from gridsieve.search.films import FilmFile
from gridsieve.search.parts import Folder
from gridsieve.search.store import Store

# Calls that run at once: each may hold the bytes of its film.
AT_ONCE = 8
# Beside those whose remedy is for a file that is too large to send.
_OF_ONE_FILM = (MediaRejected, MediaDamaged, PromptTooLong)


@dataclass(frozen=True, slots=True)
class Skipped:
    """A film that has no moments in the index, because it cannot be read, or is too large to send."""

    path: str
    error: InvalidRequest


@dataclass(slots=True)
class Progress:
    """What an update has done until now.

    share: of the bytes of new and changed films, 0 to 1. films: those that are complete now. moments, video_s: how many
    vectors were made, and how long their moments last together. elapsed_s: since the update began.
    """

    share: float = 0.0
    films: int = 0
    moments: int = 0
    video_s: float = 0.0
    elapsed_s: float = 0.0
    skipped: list[Skipped] = field(default_factory=list)

    @property
    def speed(self) -> float:
        """Seconds of video in a second."""
        return self.video_s / self.elapsed_s if self.elapsed_s else 0.0


class Update:
    """window_s, frames, options, report: as of `FolderIndex.update`."""

    def __init__(
        self,
        folder: Folder,
        embedder: GridsieveClient,
        store: Store,
        window_s: float | None,
        frames: FrameOptions,
        options: ReadOptions,
        report: Callable[[Progress], None],
    ) -> None:
        self._folder, self._embedder, self._store = folder, embedder, store
        self._window_s, self._frames, self._options, self._report = window_s, frames, options, report
        self._reading, self._places = asyncio.Lock(), asyncio.Semaphore(AT_ONCE)
        self._began_s, self._progress = time.monotonic(), Progress()
        self._contents: dict[str, asyncio.Lock] = {}
        self._unread: list[str] = []
        self._bytes = self._read_bytes = 0.0

    async def run(self, paths: Sequence[str] | None) -> Progress:
        """Arguments and errors: as of `FolderIndex.update`."""
        if paths is None:
            changed = await asyncio.to_thread(self._changed)
        else:
            changed = await asyncio.to_thread(named_films, self._folder.path, paths)
        self._bytes = sum(each.size_bytes for each in changed)
        await together(self._film(each) for each in changed)
        if paths is None:
            await asyncio.to_thread(self._store.drop_moments_but, self._unread)
        self._advance(self._bytes - self._read_bytes)
        return self._progress

    def _changed(self) -> list[FilmFile]:
        """Removes films whose files are gone from the index, and returns those that the index lacks."""
        films, held = film_files(self._folder.path), set(self._store.films())
        for gone in {each.path for each in held} - {each.path for each in films}:
            self._store.remove_film(gone)
        return [each for each in films if each not in held]

    async def _film(self, film: FilmFile) -> None:
        path, digest = self._folder.path / film.path, ""
        try:
            async with self._reading:
                digest = await asyncio.to_thread(digest_of, path)
            async with self._contents.setdefault(digest, asyncio.Lock()):  # a copy waits, and then has all
                length_s = await asyncio.to_thread(self._store.length_s, digest)
                if length_s is None:
                    async with self._reading:
                        cut = await asyncio.to_thread(cut_film, path, self._window_s)
                    length_s = cut.length_s
                    missing = await asyncio.to_thread(self._missing, digest, cut)
                    await together(self._moment(film, digest, each, length_s) for each in missing)
                await asyncio.to_thread(self._store.add_film, film, digest, length_s)
        except OSError as error:  # such as a file that was removed meanwhile
            await self._skip(film, digest, MediaRejected(f"cannot be read: {error.strerror or error}", field=film.path))
        except InvalidRequest as error:
            if not isinstance(error, _OF_ONE_FILM) and error.remedy != IN_PYTHON:
                raise
            await self._skip(film, digest, error)
        else:
            self._progress.films += 1
            self._advance(0)

    def _missing(self, digest: str, cut: CutFilm) -> list[CutSpan]:
        return [each for each in cut.spans if not self._store.has_moment(digest, each.span)]

    async def _skip(self, film: FilmFile, digest: str, error: InvalidRequest) -> None:
        """What the index had of the file is older than it."""
        await asyncio.to_thread(self._store.remove_film, film.path)
        self._unread.append(digest)
        self._progress.skipped.append(Skipped(film.path, error))

    async def _moment(self, film: FilmFile, digest: str, cut: CutSpan, film_s: float) -> None:
        frames, span = self._frames, cut.span
        if not cut.has_keyframe and frames.get("mode") == KEYFRAMES:
            frames = {**frames, "mode": None}
        async with self._places:
            part = self._folder.part(film.path, span.start_s, span.end_s, frames)
            found = await self._embedder.embed(part, **self._options)
        await asyncio.to_thread(self._store.add_moment, digest, span, found.values, cut.picture)
        lasts_s = span.end_s - span.start_s
        self._progress.moments += 1
        self._progress.video_s += lasts_s
        self._advance(film.size_bytes * lasts_s / film_s)

    def _advance(self, read_bytes: float) -> None:
        self._read_bytes += read_bytes
        self._progress.share = self._read_bytes / self._bytes if self._bytes else 1.0
        self._progress.elapsed_s = time.monotonic() - self._began_s
        self._report(self._progress)
