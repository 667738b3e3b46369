"""The index of a folder of films: it makes vectors of their moments, finds moments, and puts them into a question.

    async with GridsieveClient("127.0.0.1:50063") as embedder, FolderIndex("films", embedder) as index:
        await index.update()
        for moment in await index.search("a red car stops"):
            print(moment.path, moment.start_s, moment.end_s, moment.score)
        async with GridsieveClient() as client:
            shown = await index.shown_for("When does the red car stop?")
            print(await client.ask(index.parts(shown), "When does the red car stop?"))

It knows neither SQL nor how films are decoded.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import FrameOptions, Part, ReadOptions, StrPath, Text
from gridsieve.common.contract.errors import InvalidRequest, StartupError
from gridsieve.moments.parts import Folder
from gridsieve.moments.store import FilmMoment, Store
from gridsieve.moments.update import Progress, Update

FILE = ".gridsieve/index.sqlite"
# Of a question: the best moments, as many moments spread over the folder, and frames of each.
BEST, SPREAD, MAX_FRAMES = 4, 4, 16
INTRODUCTION = "Moments of films follow, each after its file and its seconds. Answer with the file and the seconds."


class FolderIndex:
    """The index of a folder. An asynchronous context manager.

    embedder: a client of a service whose model embeds.
    store: a URL, postgresql://…; None: the file `FILE` in the folder.
    on_server: the service opens films by their paths, which must lie below preprocessing's --media-root; else their
        bytes are sent.
    Entering raises InvalidRequest if the model does not embed, and as `GridsieveClient.models`. Each call raises
    StartupError without the packages of the extra "search", and Unavailable for a store that fails.
    """

    def __init__(
        self, folder: StrPath, embedder: GridsieveClient, *, store: str | None = None, on_server: bool = False
    ) -> None:
        self._folder, self._embedder, self._url = Folder(Path(folder), on_server), embedder, store
        self._model = ""
        self._opened: Store | None = None

    async def __aenter__(self) -> Self:
        model, *_ = await self._embedder.models()
        if model.task != "embed":
            text = f"{self._embedder.address} serves {model.name}, which does not embed (its task is {model.task})"
            remedy = "give the address of a service with an embedder, such as Qwen3-VL-Embedding-2B"
            raise InvalidRequest(text, remedy=remedy)
        self._model = model.name
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._opened is not None:
            self._opened.close()

    async def update(
        self,
        *,
        window_s: float | None = None,
        frames: FrameOptions | None = None,
        options: ReadOptions | None = None,
        report: Callable[[Progress], None] = lambda _: None,
    ) -> Progress:
        """Makes vectors of the moments of new and changed films, and forgets films that are gone.

        What is done stays: after an error or an interruption, a later call goes on with what is missing.

        window_s: moments are parts of a film of about so many seconds; None: its shots.
        frames, options: of each moment. "keyframes" has no effect on a moment without one.
        report: called after each moment and each film.
        Returns what was done; films that cannot be read are in `Progress.skipped`. Raises InvalidRequest for settings
        other than those of the vectors that are there, OSError for files, and as `GridsieveClient.embed`.
        """
        if window_s is not None and not window_s > 0:
            raise InvalidRequest(field="window_s", limit="above 0", value=window_s)
        frames, options = frames or {}, options or {}
        given = {"model": self._model, "window_s": window_s, **frames, **options}
        wanted = {name: value for name, value in given.items() if value is not None}
        store = self._store(create=True)
        with store.locked():
            held = store.settings()
            if held is None:
                store.set_settings(wanted | self._place)
            else:
                self._check_place(held)
                for name in sorted(held.keys() | wanted.keys() - self._place.keys()):
                    self._check(held, wanted | self._place, name)
            update = Update(self._folder, self._embedder, store, window_s, frames, options, report)
            return await update.run()

    async def search(self, text: str, limit: int = 5) -> list[FilmMoment]:
        """The moments whose vectors are nearest to that of a text, the nearest first.

        Raises InvalidRequest if there is no index, or one by another model, and as `GridsieveClient.embed`.
        """
        store = self._searched()
        found = await self._embedder.embed(None, text)
        return await asyncio.to_thread(store.nearest, found.values, limit)

    async def shown_for(self, question: str, best: int = BEST, spread: int = SPREAD) -> list[FilmMoment]:
        """The best moments for a question, and moments spread evenly over the time of all films; by path and time.

        Raises as `search`.
        """
        shown = {(each.path, each.start_s): each for each in await self.search(question, best)}
        moments = await asyncio.to_thread(self._searched().moments)
        until_s = list(accumulate(each.end_s - each.start_s for each in moments))
        for number in range(spread if moments else 0):
            time_s = (number + 0.5) / spread * until_s[-1]
            each = moments[bisect.bisect_right(until_s, time_s, hi=len(moments) - 1)]
            shown.setdefault((each.path, each.start_s), each)
        return [each for _, each in sorted(shown.items())]

    def parts(self, moments: Sequence[FilmMoment], frames: FrameOptions | None = None) -> list[Part]:
        """What precedes a question: each moment after its file and its times.

        frames: None: at most MAX_FRAMES of each moment.
        """
        parts: list[Part] = [Text(INTRODUCTION)]
        for each in moments:
            told = Text(f"{each.path}, {each.start_s:.1f} to {each.end_s:.1f} seconds:")
            part = self._folder.part(each.path, each.start_s, each.end_s, frames or FrameOptions(max_frames=MAX_FRAMES))
            parts += [told, part]
        return parts

    @property
    def _place(self) -> dict[str, Any]:
        """What a store that is elsewhere knows of the folder."""
        return {} if self._url is None else {"folder": str(self._folder.path.resolve())}

    def _searched(self) -> Store:
        """Raises InvalidRequest where nothing is to be searched."""
        store = self._store()
        held = store.settings()
        if held is None:
            raise self._missing()
        self._check_place(held)
        self._check(held, {"model": self._model}, "model")
        return store

    def _store(self, create: bool = False) -> Store:
        file = self._folder.path / FILE
        if self._opened is None:
            if not (create or self._url or file.exists()):
                raise self._missing()
            self._opened = _open(self._url, file)
        return self._opened

    def _missing(self) -> InvalidRequest:
        folder = self._folder.path
        return InvalidRequest(f"{folder} has no index", remedy=f"gridsieve index {folder} makes it")

    def _check_place(self, held: Mapping[str, Any]) -> None:
        if held.get("folder") != self._place.get("folder"):
            text = f"the store has the index of {held.get('folder')}, not of {self._folder.path}"
            raise InvalidRequest(text, remedy="give each folder a database or a schema of its own")

    def _check(self, held: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> None:
        if held.get(name) != wanted.get(name):
            text = f"the vectors of {self._folder.path} were made with {name} {held.get(name)}, got {wanted.get(name)}"
            where = "drop the tables of the store" if self._url else f"remove {self._folder.path / FILE}"
            raise InvalidRequest(text, remedy=f"give the same, or {where} to make all again")


def _open(url: str | None, file: Path) -> Store:
    """Raises StartupError for another database, and without its packages."""
    try:
        if url is None:
            from gridsieve.moments.sqlite_store import SqliteStore

            store: Store = SqliteStore(file)
        elif url.startswith(("postgresql://", "postgres://")):
            from gridsieve.moments.postgres_store import PostgresStore

            store = PostgresStore(url)
        else:
            raise StartupError("the store must be a URL that begins with postgresql://")
    except ModuleNotFoundError as error:
        raise StartupError(f"an index needs {error.name}: pip install 'gridsieve[search]'") from error
    store.create()
    return store
