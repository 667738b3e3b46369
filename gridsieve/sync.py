"""The synchronous client, for scripts and notebooks: the calls of `gridsieve.GridsieveClient` without `await`.

    from gridsieve.sync import GridsieveClient

    with GridsieveClient("127.0.0.1:50053") as client:
        print(client.ask("clip.mp4", "What moves?", pruning_rate=0.75))
        for event in client.stream("clip.mp4", "What moves?", pruning_rate=0.75):
            ...

One thread runs the asyncio client, so any number of threads may call it at the same time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar, Unpack

import numpy as np
from numpy.typing import NDArray

from gridsieve.client import client as asynchronous
from gridsieve.client import live as watching
from gridsieve.client.answer import Answer, Delta, Event, Finished
from gridsieve.client.credentials import Access
from gridsieve.client.live_events import LiveEvent
from gridsieve.client.prompt import LiveOptions, Message, Options, PartLike, ReadOptions, Sampling, StrPath
from gridsieve.client.vectors import Content, Embedding, Score

T = TypeVar("T")


class GridsieveClient:
    """A connection to the generation service. Arguments and errors are those of `gridsieve.GridsieveClient`.

    Close it, or use it as a context manager: its thread runs until then.
    """

    def __init__(self, address: str = asynchronous.DEFAULT_ADDRESS, **access: Unpack[Access]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="gridsieve client", daemon=True)
        self._thread.start()
        try:
            self._client = self._run(_connected(address, access))
        except BaseException:
            self._stop()
            raise

    @property
    def address(self) -> str:
        return self._client.address

    def ask(
        self,
        media: PartLike | Sequence[PartLike] | None,
        question: str,
        *,
        history: Sequence[Message] = (),
        **options: Unpack[Options],
    ) -> Answer:
        """Returns the complete answer. An interrupt (Ctrl-C) cancels the request."""
        return self._run(self._client.ask(media, question, history=history, **options))

    def stream(
        self,
        media: PartLike | Sequence[PartLike] | None,
        question: str,
        *,
        history: Sequence[Message] = (),
        **options: Unpack[Options],
    ) -> Iterator[Event]:
        """Yields the events of a request as they arrive; leaving the loop early cancels the request."""
        return self._iterated(self._client.stream(media, question, history=history, **options))

    def embed(
        self,
        media: PartLike | Sequence[PartLike] | None,
        text: str = "",
        *,
        instruction: str | None = None,
        dimensions: int | None = None,
        **options: Unpack[ReadOptions],
    ) -> Embedding:
        """The vector of media and text, by a model that embeds."""
        return self._run(self._client.embed(media, text, instruction=instruction, dimensions=dimensions, **options))

    def score(
        self,
        query: Content,
        documents: Sequence[Content],
        *,
        instruction: str | None = None,
        **options: Unpack[ReadOptions],
    ) -> list[Score]:
        """How well each document answers a query, by a model that scores."""
        return self._run(self._client.score(query, documents, instruction=instruction, **options))

    @contextmanager
    def live(self, **options: Unpack[LiveOptions]) -> Iterator[LiveSession]:
        """A conversation that watches."""
        session = self._run(self._entered(options))
        try:
            yield LiveSession(session, self._run, self._iterated)
        finally:
            self._run(session.__aexit__(None, None, None))

    def close(self) -> None:
        """Cancels running requests, closes the connection and ends the thread."""
        if self._thread.is_alive():
            self._run(self._client.close())
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _entered(self, options: LiveOptions) -> watching.LiveSession:
        return await self._client.live(**options).__aenter__()

    def _iterated(self, values: AsyncGenerator[T]) -> Iterator[T]:
        async def following() -> T | None:
            return await anext(values, None)

        try:
            while (value := self._run(following())) is not None:
                yield value
        finally:
            self._run(values.aclose())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the thread and returns its result."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class LiveSession:
    """The calls of `gridsieve.LiveSession` without `await`: one thread may show frames while others ask or follow."""

    def __init__(
        self,
        session: watching.LiveSession,
        run: Callable[[Coroutine[Any, Any, Any]], Any],
        iterated: Callable[[AsyncGenerator[Any]], Iterator[Any]],
    ) -> None:
        self._session, self._run, self._iterated = session, run, iterated

    @property
    def request_id(self) -> str:
        return self._session.request_id

    def show(self, picture: bytes | NDArray[np.uint8] | StrPath, time_s: float | None = None) -> None:
        self._run(self._session.show(picture, time_s))

    def send_clip(self, data: bytes, *, begins: bool = False) -> None:
        self._run(self._session.send_clip(data, begins=begins))

    def ask(
        self, question: str, *, transient: bool = False, **sampling: Unpack[Sampling]
    ) -> Iterator[Delta | Finished]:
        return self._iterated(self._session.ask(question, transient=transient, **sampling))

    def answer(self, question: str, *, transient: bool = False, **sampling: Unpack[Sampling]) -> Answer:
        answer: Answer = self._run(self._session.answer(question, transient=transient, **sampling))
        return answer

    def events(self) -> Iterator[LiveEvent]:
        """What happens from this call on."""

        async def from_now() -> AsyncGenerator[LiveEvent]:
            return self._session.events()

        return self._iterated(self._run(from_now()))

    def cancel(self) -> None:
        self._run(self._session.cancel())

    def close(self) -> None:
        self._run(self._session.close())


async def _connected(address: str, access: Access) -> asynchronous.GridsieveClient:
    return asynchronous.GridsieveClient(address, **access)  # its channel belongs to the loop that runs now
