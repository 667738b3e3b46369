"""The synchronous client, for scripts and notebooks: the calls of `framesieve.FramesieveClient` without `await`.

    from framesieve.sync import FramesieveClient

    with FramesieveClient("127.0.0.1:50053") as client:
        print(client.ask("clip.mp4", "What moves?", pruning_rate=0.75))
        for event in client.stream("clip.mp4", "What moves?", pruning_rate=0.75):
            ...

One thread runs the asyncio client, so any number of threads may call it at the same time.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from framesieve.client import client as asynchronous
from framesieve.client.answer import Answer, Event
from framesieve.client.credentials import Access
from framesieve.client.prompt import Message, Options, PartLike

T = TypeVar("T")


class FramesieveClient:
    """A connection to the generation service. Arguments and errors are those of `framesieve.FramesieveClient`.

    Close it, or use it as a context manager: its thread runs until then.
    """

    def __init__(self, address: str = asynchronous.DEFAULT_ADDRESS, **access: Unpack[Access]) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="framesieve client", daemon=True)
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
        events = self._client.stream(media, question, history=history, **options)

        async def following() -> Event | None:
            return await anext(events, None)

        try:
            while event := self._run(following()):
                yield event
        finally:
            self._run(events.aclose())

    def close(self) -> None:
        """Cancels running requests, closes the connection and ends the thread."""
        if self._thread.is_alive():
            self._run(self._client.close())
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

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


async def _connected(address: str, access: Access) -> asynchronous.FramesieveClient:
    return asynchronous.FramesieveClient(address, **access)  # its channel belongs to the loop that runs now
