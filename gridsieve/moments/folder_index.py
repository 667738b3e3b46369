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
from collections.abc import Callable, Sequence

from gridsieve.client.prompt import FrameOptions, ReadOptions
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.moments.update import Progress, Update
from gridsieve.search.folder_search import FolderSearch


class FolderIndex(FolderSearch):
    """The index of a folder, to be made and read. An asynchronous context manager; see `FolderSearch`."""

    async def update(
        self,
        *,
        paths: Sequence[str] | None = None,
        window_s: float | None = None,
        frames: FrameOptions | None = None,
        options: ReadOptions | None = None,
        report: Callable[[Progress], None] = lambda _: None,
    ) -> Progress:
        """Makes vectors of the moments of new and changed films, and forgets films that are gone.

        What is done stays: after an error or an interruption, a later call goes on with what is missing.

        paths: of new films, relative to the folder; no other film is read or forgotten, and one that is not there is
        passed over. None: all films of the folder.
        window_s: moments are parts of a film of about so many seconds; None: its shots.
        frames, options: of each moment. "keyframes" has no effect on a moment without one.
        report: called after each moment and each film.
        Returns what was done; films that cannot be read or sent are in `Progress.skipped`. Raises InvalidRequest for
        settings other than those of the vectors that are there, OSError for files, and as `GridsieveClient.embed`.
        """
        frames, options = frames or {}, options or {}
        store = await asyncio.to_thread(self._store, create=True)
        async with store.locked():
            await asyncio.to_thread(self.begin, window_s=window_s, frames=frames, options=options)
            update = Update(self._folder, self._embedder, store, window_s, frames, options, report)
            return await update.run(paths)

    def begin(
        self,
        *,
        window_s: float | None = None,
        frames: FrameOptions | None = None,
        options: ReadOptions | None = None,
    ) -> None:
        """Makes an empty index of these settings where there is none. Arguments and errors: as of `update`."""
        if window_s is not None and not window_s > 0:
            raise InvalidRequest(field="window_s", limit="above 0", value=window_s)
        given = {"model": self._model, "window_s": window_s, **(frames or {}), **(options or {})}
        wanted = {name: value for name, value in given.items() if value is not None} | self._identity
        store = self._store(create=True)
        store.create()
        held = store.settings()
        if held is None:
            store.set_settings(wanted)
            held = store.settings() or wanted
        self._check_identity(held)
        for name in sorted(held.keys() | wanted.keys()):
            self._check(held, wanted, name)
