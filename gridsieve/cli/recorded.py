"""What a command watches, kept as films with an index (`--index`), and questions that recall earlier moments of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import cast

from gridsieve.cli.options import RecordingFlags
from gridsieve.cli.terminal import reported_errors
from gridsieve.client.answer import Answer
from gridsieve.client.client import GridsieveClient
from gridsieve.client.credentials import Access
from gridsieve.client.live_events import LiveEvent, LiveSlice
from gridsieve.client.prompt import Message, Options, Sampling
from gridsieve.common.contract.errors import Overloaded, Unavailable
from gridsieve.moments.recording import Recording
from gridsieve.search.films import FilmMoment


@asynccontextmanager
async def recorded(
    flags: RecordingFlags, access: Access, say: Callable[[str], None], as_json: bool
) -> AsyncIterator[Recording]:
    """flags: checked, with --index. say: as of `Recording`. Errors of the embedder are reported as its own."""
    assert flags.index is not None
    assert flags.embedder is not None
    async with AsyncExitStack() as stack:
        with reported_errors(flags.embedder, as_json=as_json):
            flags.index.mkdir(parents=True, exist_ok=True)
            embedder = await stack.enter_async_context(GridsieveClient(flags.embedder, **access))
            made = Recording(flags.index, embedder, store=flags.store, say=say)
            recording = await stack.enter_async_context(made)
        yield recording


class Recall:
    """Questions about a camera that are requests of their own: the model is shown the best earlier moments of the
    index, then the newest pictures.

    best: how many moments; 0: slices are recorded, and nothing is asked.
    told: takes each question, its answer and the moments. missed: takes why a question was not answered.
    """

    def __init__(
        self,
        client: GridsieveClient,
        recording: Recording,
        camera: str,
        best: int,
        history: Sequence[Message],
        options: Options,
        told: Callable[[str, Answer, Sequence[FilmMoment]], None],
        missed: Callable[[str], None],
    ) -> None:
        self._client, self._recording, self._camera, self._best = client, recording, camera, best
        self._history, self._options, self._told, self._missed = history, options, told, missed

    async def follow(self, events: AsyncIterator[LiveEvent], question: str, sampling: Sampling, every_s: float) -> None:
        """Records slices until the session ends, and asks whenever so many seconds of video have passed, unless the
        last answer is awaited. every_s: 0: never."""
        since_s: float | None = None
        asking: asyncio.Task[None] | None = None
        try:
            async for event in events:
                if not isinstance(event, LiveSlice):
                    continue
                self._recording.take(self._camera, event)
                since_s = event.first_time_s if since_s is None else since_s
                is_due = bool(self._best and every_s) and event.last_time_s - since_s >= every_s
                if is_due and (asking is None or asking.done()):
                    if asking:
                        asking.result()
                    since_s = event.last_time_s
                    asking = asyncio.create_task(self.ask(question, sampling))
            if asking:
                await asking
        finally:
            if asking:
                asking.cancel()

    async def ask(self, question: str, sampling: Sampling) -> None:
        options = cast(Options, {**self._options, **sampling})
        try:
            parts, shown = await self._recording.recalled(self._camera, question, self._best)
            answer = await self._client.ask(parts, question, history=self._history, **options)
        except (Unavailable, Overloaded, OSError) as error:  # OSError: a film that was deleted meanwhile
            self._missed(f"not answered: {error}")
        else:
            self._told(question, answer, shown)
