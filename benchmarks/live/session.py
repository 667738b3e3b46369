"""A live session's call, and what its responses say."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from gridsieve.common.channels import write_to
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.generation_pb2 import LiveAsk, LiveFrame, LiveOpen, LiveRequest, LiveResponse, LiveUsage, Sampling
from gridsieve.v1.generation_pb2_grpc import GenerationServiceStub

QUESTION = "What happens in the video?"


class Session:
    """A Live call. dropped: frames that the responses read so far report as dropped. usage: the last one among them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call: Any = GenerationServiceStub(channel).Live()
        self.dropped = 0
        self.usage = LiveUsage()

    @classmethod
    @asynccontextmanager
    async def opened(cls, channel: grpc.aio.Channel, **wanted: Any) -> AsyncIterator[Session]:
        """A session that is accepted. wanted: fields of LiveOpen. Leaving it cancels the call."""
        session = cls(channel)
        try:
            await session.send(open=LiveOpen(**wanted))
            await session.until("accepted")
            yield session
        finally:
            session._call.cancel()

    async def send(self, **request: Any) -> None:
        await write_to(self._call, LiveRequest(**request))

    async def read(self) -> LiveResponse | None:
        """The next response; None at the end of the call."""
        arrived = await self._call.read()
        if arrived is grpc.aio.EOF:
            return None
        response: LiveResponse = arrived
        self.dropped += response.dropped.frames
        kind = response.WhichOneof("response")
        if kind in ("slice", "finished"):
            self.usage = getattr(response, kind).usage
        return response

    async def until(self, *kinds: str) -> None:
        """Reads up to the next response of one of these kinds."""
        while (response := await self.read()) is not None:
            if response.WhichOneof("response") in kinds:
                return
        raise AssertionError(f"the session ended before {kinds}")

    async def ended(self) -> None:
        while await self.read():
            pass

    async def watch(self, frames: Sequence[bytes], times_s: Sequence[float]) -> None:
        """Sends frames, two at a time, each two once those before them are a slice."""
        for place, (picture, time_s) in enumerate(zip(frames, times_s, strict=True)):
            await self.send(frame=LiveFrame(picture=picture, time_s=time_s))
            if place % 2:
                await self.until("slice", "dropped")

    async def ask(self, tokens: int, *, transient: bool, text: str = QUESTION) -> None:
        """Asks for an answer of so many tokens, and reads nothing."""
        sampling = Sampling(max_new_tokens=tokens, temperature=0, ignore_eos=True)
        await self.send(ask=LiveAsk(parts=[prompt_pb2.Part(text=text)], sampling=sampling, transient=transient))

    async def first_token_s(self) -> float:
        """How long the first token of a question takes that leaves no trace."""
        start = time.perf_counter()
        await self.ask(2, transient=True)
        await self.until("delta")
        taken = time.perf_counter() - start
        await self.until("finished")
        return taken
