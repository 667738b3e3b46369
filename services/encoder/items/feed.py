"""One call of Preprocess and what it decodes, which outlives its caller where others wait for the same.

    caller A   plan ─ select X ──── gone
    its feed         X X X X X X X X X X     goes on, since B waits for X; ends with the last who waits
    caller B          plan ─ shares X ─────▶ answered

Nobody asks preprocessing a second time for a plan that it has made: media are opened, fetched and hashed once a
request. So a pass runs on the stream of the request that began it, without that request's deadline, and the cache's
entry owns it from then on. Where a stream fails, another of those who wait goes on, on a stream of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

from framesieve.v1 import prompt_pb2

from common.contract.errors import DeadlinePassed, Overloaded, Unavailable
from common.contract.plan import Grid, PromptPlan
from services.encoder.items.cache import Entry
from services.encoder.items.encoding import FrameSlice
from services.encoder.items.preprocess_stream import FrameStream

# What says nothing about the media that was being decoded: another stream may have better luck.
_TRY_AGAIN = (Unavailable, DeadlinePassed, Overloaded, asyncio.CancelledError)


class Feed:
    """A request's stream from preprocessing; it belongs to the request until `leave`, then to whoever waits."""

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._due: dict[int, Entry] = {}
        self._writing = asyncio.Lock()
        self._reading: asyncio.Task[None] | None = None
        self._left = False

    @property
    def fetched_ns(self) -> int | None:
        """When media that came by URL had been fetched, once the plan is there."""
        return self._stream.fetched_ns

    async def plan(self, prompt: prompt_pb2.Prompt, brought: Mapping[int, Grid]) -> PromptPlan:
        """Of the prompt, checked. brought: see `Expectation.check`. From here on the stream is read."""
        plan = await self._stream.plan(prompt, brought)
        self._reading = asyncio.create_task(self._read())
        self._reading.add_done_callback(_told)
        return plan

    async def select(self, media_index: int, entry: Entry) -> None:
        """Asks for an item's frames, for which the entry has room. Raises what the stream has failed by."""
        async with self._writing:
            assert self._reading is not None
            if self._reading.done():
                self._reading.result()
            self._due[media_index] = entry
            try:
                await self._stream.select(media_index, entry.encoding.plan)
            except BaseException:
                self._due.pop(media_index, None)
                raise

    async def all_selected(self) -> None:
        """Nothing more will be selected."""
        async with self._writing:
            await self._stream.all_selected()

    def brings(self, entry: Entry) -> bool:
        return entry in self._due.values()

    async def ended(self) -> None:
        """Waits until the stream has ended as it should. Raises what it failed by."""
        assert self._reading is not None
        await asyncio.wait([self._reading])
        self._reading.result()

    def leave(self) -> None:
        """The request is gone; what others wait for is still decoded."""
        self._left = True
        self.end_if_unwanted()

    def end_if_unwanted(self) -> None:
        """Stops the decoder once the request is gone and nobody else waits."""
        if self._left and not any(entry.waiters for entry in self._due.values()):
            self._stream.cancel()
            if self._reading is not None:
                self._reading.cancel()

    async def _read(self) -> None:
        try:
            async with aclosing(self._stream.slices()) as slices:
                async for piece in slices:
                    await self._pass_on(piece)
        except BaseException as error:
            self._fail(error)
            raise

    async def _pass_on(self, piece: FrameSlice) -> None:
        entry = self._due.get(piece.media_index)
        if entry is None:  # whoever selected it left before the selection was sent
            return
        await entry.encoding.add(piece)
        if piece.index + 1 == entry.encoding.plan.grid.t:
            del self._due[piece.media_index]
            entry.lose(self, None)
            self.end_if_unwanted()

    def _fail(self, error: BaseException) -> None:
        """Items come in the order of their selection: an error is the first one's, and says nothing of the others."""
        for place, entry in enumerate(self._due.values()):
            blamed = place == 0 and not isinstance(error, _TRY_AGAIN)
            entry.lose(self, error if blamed else None)
        self._due.clear()


def _told(reading: asyncio.Task[None]) -> None:
    """An error is told to whoever waits; where nobody does, to nobody."""
    if not reading.cancelled():
        reading.exception()
