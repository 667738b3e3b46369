"""A folder of films that `gridsieve ask` is asked about: its index says which moments the model is shown."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from gridsieve.cli.options import ClipFlags
from gridsieve.cli.terminal import reported_errors
from gridsieve.client.client import GridsieveClient
from gridsieve.client.credentials import Access
from gridsieve.client.prompt import FrameOptions, Part
from gridsieve.search.films import FilmMoment
from gridsieve.search.folder_search import FolderSearch


class AskedFolder:
    """An asynchronous context manager. Errors of the embedder are reported as its own."""

    def __init__(
        self,
        folder: Path,
        embedder: str,
        store: str | None,
        clip: ClipFlags,
        num_frames: int | None,
        access: Access,
        as_json: bool,
    ) -> None:
        given = FrameOptions(**clip.options(), num_frames=num_frames)
        self._frames = given if any(value is not None for value in given.values()) else None
        self._embedder, self._as_json = GridsieveClient(embedder, **access), as_json
        self._index = FolderSearch(folder, self._embedder, store=store, on_server=clip.on_server)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        with reported_errors(self._embedder.address, as_json=self._as_json):
            await self._stack.enter_async_context(self._embedder)
            await self._stack.enter_async_context(self._index)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def shown_for(self, question: str) -> tuple[list[Part], list[FilmMoment]]:
        """What precedes a question, and the moments in it, by file and time."""
        with reported_errors(self._embedder.address, as_json=self._as_json):
            moments = await self._index.shown_for(question)
        return self._index.parts(moments, self._frames), moments
