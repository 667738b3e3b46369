"""The search in the index of a folder of films: moments that a text describes, and how they are put into a question.

    async with GridsieveClient("127.0.0.1:50063") as embedder, FolderSearch("films", embedder) as folder:
        for moment in await folder.search("a red car stops"):
            print(moment.path, moment.start_s, moment.end_s, moment.score)

It knows neither SQL nor how an index is made.
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

from gridsieve.client.client import GridsieveClient, Metadata
from gridsieve.client.prompt import FrameOptions, Part, ReadOptions, StrPath, Text, user_turn
from gridsieve.client.vectors import Embedding
from gridsieve.common.contract.errors import InvalidRequest, StartupError
from gridsieve.search.films import FilmMoment
from gridsieve.search.parts import Folder
from gridsieve.search.store import Store

FILE = ".gridsieve/index.sqlite"
FORMAT = 2
"""Of the tables of `gridsieve.search.store`, in the settings of each index."""
# Of a question: the best moments, as many moments spread over the folder, and frames of each.
BEST, SPREAD, MAX_FRAMES = 4, 4, 16
INTRODUCTION = "Moments of films follow, each after its file and its seconds. Answer with the file and the seconds."


class FolderSearch:
    """The index of a folder, to be read. An asynchronous context manager.

    embedder: a client of a service with the model that made the index.
    store: a URL, postgresql://…; None: the file `FILE` in the folder.
    on_server: the service opens films by their paths, which must lie below preprocessing's --media-root; else their
        bytes are sent.
    metadata: of calls to the embedder.
    Entering raises InvalidRequest if the model does not embed, and as `GridsieveClient.models`. Each call raises
    StartupError without the packages of the extra "search", and Unavailable for a store that fails.
    """

    def __init__(
        self,
        folder: StrPath,
        embedder: GridsieveClient,
        *,
        store: str | None = None,
        on_server: bool = False,
        metadata: Metadata = (),
    ) -> None:
        self._folder, self._embedder, self._url = Folder(Path(folder), on_server), embedder, store
        self._metadata = metadata
        self._model = ""
        self._opened: Store | None = None

    async def __aenter__(self) -> Self:
        model, *_ = await self._embedder.models(metadata=self._metadata)
        if model.task != "embed":
            text = f"{self._embedder.address} serves {model.name}, which does not embed (its task is {model.task})"
            remedy = "give the address of a service with an embedder, such as Qwen3-VL-Embedding-2B"
            raise InvalidRequest(text, remedy=remedy)
        self._model = model.name
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)  # a search that was cancelled may still run in its thread

    async def search(self, text: str, limit: int = 5) -> list[FilmMoment]:
        """The moments whose vectors are nearest to that of a text, the nearest first.

        Raises InvalidRequest if there is no index, or one by another model, and as `GridsieveClient.embed`.
        """
        return await self.nearest(await self.embedded(text), limit)

    async def embedded(self, text: str) -> Embedding:
        """The vector of a text, and what it cost. Raises as `search`."""
        await asyncio.to_thread(self._searched)
        said = [user_turn(None, text)]
        return await self._embedder.embedding(said, None, None, ReadOptions(), metadata=self._metadata)

    async def nearest(self, sought: Embedding, limit: int) -> list[FilmMoment]:
        """As `search`, by a vector of `embedded`."""
        store = await asyncio.to_thread(self._searched)
        return await asyncio.to_thread(store.nearest, sought.values, limit)

    async def pictures(self, moments: Sequence[FilmMoment]) -> list[bytes]:
        """A frame of each moment, JPEG; empty where none could be decoded. Raises as `search`."""
        store = await asyncio.to_thread(self._searched)
        return await asyncio.to_thread(lambda: [store.picture(each) for each in moments])

    async def shown_for(self, question: str, best: int = BEST, spread: int = SPREAD) -> list[FilmMoment]:
        """The best moments for a question, and moments spread evenly over the time of all films; by path and time.

        Raises as `search`.
        """
        shown = {(each.path, each.start_s): each for each in await self.search(question, best)}
        moments = await asyncio.to_thread(self._searched().moments) if spread else []
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
    def _identity(self) -> dict[str, Any]:
        """What the settings of an index have beside how its vectors were made: a store elsewhere names the folder."""
        place = {} if self._url is None else {"folder": str(self._folder.path.resolve())}
        return {"format": FORMAT, **place}

    def _searched(self) -> Store:
        """Raises InvalidRequest where nothing is to be searched."""
        store = self._store()
        held = store.settings()
        if held is None:
            raise self._missing()
        self._check_identity(held)
        self._check(held, {"model": self._model}, "model")
        return store

    def _store(self, create: bool = False) -> Store:
        file = self._folder.path / FILE
        if self._opened is None:
            if not (create or self._url or file.exists()):
                raise self._missing()
            self._opened = opener(self._url, file)()
        return self._opened

    def _missing(self) -> InvalidRequest:
        folder = self._folder.path
        return InvalidRequest(f"{folder} has no index", remedy=f"gridsieve index {folder} makes it")

    def _check_identity(self, held: Mapping[str, Any]) -> None:
        if held.get("folder") != self._identity.get("folder"):
            text = f"the store has the index of {held.get('folder')}, not of {self._folder.path}"
            raise InvalidRequest(text, remedy="give each folder a database or a schema of its own")
        if held.get("format") != FORMAT:
            text = f"the index of {self._folder.path} has format {held.get('format', 1)}, this release reads {FORMAT}"
            raise InvalidRequest(text, remedy=f"{self._removal} and make the index again")

    def _check(self, held: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> None:
        if held.get(name) != wanted.get(name):
            text = f"the vectors of {self._folder.path} were made with {name} {held.get(name)}, got {wanted.get(name)}"
            raise InvalidRequest(text, remedy=f"give the same, or {self._removal} to make all again")

    @property
    def _removal(self) -> str:
        return "drop the tables of the store" if self._url else f"remove {self._folder.path / FILE}"


def opener(url: str | None, file: Path) -> Callable[[], Store]:
    """What opens a store: that of a URL, or else a file. Raises StartupError for another database, and without its
    packages."""
    try:
        if url is None:
            from gridsieve.search.sqlite_store import SqliteStore

            return partial(SqliteStore, file)
        if url.startswith(("postgresql://", "postgres://")):
            from gridsieve.search.postgres_store import PostgresStore

            return partial(PostgresStore, url)
    except ModuleNotFoundError as error:
        raise StartupError(f"an index needs {error.name}: pip install 'gridsieve[search]'") from error
    raise StartupError("the store must be a URL that begins with postgresql://")
