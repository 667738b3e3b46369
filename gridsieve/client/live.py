"""A live session: a conversation that watches.

    async with client.live(system="Be brief.", triggers=[Trigger("Is the door open?", every_s=5)]) as session:
        await session.show(jpeg)                          # again and again, as the frames come
        answer = await session.answer("What happened?")   # at any time, beside the frames
        async for event in session.events(): ...          # what was kept, what was dropped, answers of triggers

It owns the gRPC call. One task reads all responses, so that frames may be shown, questions asked and events followed
by any number of tasks at the same time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from itertools import count
from pathlib import Path
from typing import Any, Self, Unpack
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from gridsieve.client.answer import Answer, Delta, Finished
from gridsieve.client.events import LiveEvents
from gridsieve.client.live_events import LiveDelta, LiveEvent, LiveFinished, LiveRefused
from gridsieve.client.messages import live_ask, python_remedies
from gridsieve.client.prompt import Sampling, StrPath
from gridsieve.common.channels import read_from, write_to
from gridsieve.common.contract.errors import GridsieveError, InvalidRequest, PeerContract
from gridsieve.v1.generation_pb2 import (
    LiveCancel,
    LiveClip,
    LiveClose,
    LiveFrame,
    LiveOpen,
    LiveRequest,
    LiveResponse,
    RawFrame,
)


class LiveSession:
    """A live session, from `GridsieveClient.live`. An async context manager: inside the session is open.

    Leaving it ends the session at once; `close` waits for what was asked. A question that is refused, or that cannot be
    answered because a service is away (Unavailable), raises its error, and the session goes on. Any other error ends
    it: every call that waits and every later one raises that.

    request_id: as given, or as the service chose. reserved_tokens: of the KV cache, for this session.
    """

    def __init__(self, start: Callable[[], Any], opened: LiveOpen) -> None:
        """start: begins the gRPC call."""
        self.request_id, self.reserved_tokens = opened.request_id, 0
        self._start, self._opened = start, opened
        self._questions = {each.ask.ask_id: each.ask.parts[0].text for each in opened.triggers}  # by ask_id
        self._names = (f"ask-{number}" for number in count())
        self._writing = asyncio.Lock()  # gRPC takes one request at a time
        self._listeners: WeakSet[asyncio.Queue[LiveEvent | None]] = WeakSet()
        self._closed = False
        self._failure: GridsieveError | None = None

    async def __aenter__(self) -> Self:
        self._call = self._start()
        try:
            await write_to(self._call, LiveRequest(open=self._opened))
            response = await self._next()
            if response is None or not response.HasField("accepted"):
                raise PeerContract("the service did not say first that the session is open")
        except BaseException:
            self._call.cancel()
            raise
        self.request_id = response.accepted.request_id
        self.reserved_tokens = response.accepted.reserved_tokens
        self._began = time.monotonic()
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._closed = True
        self._call.cancel()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def show(self, picture: bytes | NDArray[np.uint8] | StrPath, time_s: float | None = None) -> None:
        """Sends a frame. The service uses the first one of each interval of 1 / fps. A frame of another size than those
        before it begins the session again, alone.

        picture: a picture file (JPEG, PNG, WebP, ...), as its bytes or its path, or the pixels, uint8
            [height, width, 3], RGB; at most 16 MiB.
        time_s: when it was filmed, on any clock, not before the frame before it. None: when it is sent, in seconds
            since the session was opened.
        """
        if isinstance(picture, np.ndarray):
            frame = LiveFrame(raw=_raw(picture), time_s=time_s)
        else:
            if not isinstance(picture, bytes):
                picture = await asyncio.to_thread(Path(picture).read_bytes)
            frame = LiveFrame(picture=picture, time_s=time_s)
        await self._send(stamp=time_s is None, frame=frame)

    async def send_clip(self, data: bytes, *, begins: bool = False) -> None:
        """Sends the next bytes of encoded video, in place of frames: fragmented MP4, MPEG-TS or WebM, cut anywhere.

        begins: they begin another stream, with the container's header.
        """
        await self._send(clip=LiveClip(data=data, begins=begins))

    async def ask(
        self, question: str, *, transient: bool = False, **sampling: Unpack[Sampling]
    ) -> AsyncGenerator[Delta | Finished]:
        """Yields the parts of the answer to a question about what was shown so far, and how it ended.

        transient: neither the question nor its answer stays in the conversation.
        Leaving the loop early does not end the answer; `cancel` does.
        """
        async with aclosing(self._ask(question, transient, sampling)) as parts:
            async for part in parts:
                match part:
                    case LiveDelta(delta=delta):
                        yield delta
                    case LiveFinished(answer=answer):
                        yield Finished(0, answer.reason, answer.usage, answer.timings)

    async def answer(self, question: str, *, transient: bool = False, **sampling: Unpack[Sampling]) -> Answer:
        """The whole answer. Takes the same arguments as `ask`."""
        *_, finished = [part async for part in self._ask(question, transient, sampling)]
        assert isinstance(finished, LiveFinished)
        return finished.answer

    def events(self) -> AsyncGenerator[LiveEvent]:
        """What happens from this call on, until the session has ended: slices, what went, and all answers."""
        return self._follow(self._listen())

    async def cancel(self) -> None:
        """Ends the question that is being answered and those that wait. What was said so far stays."""
        await self._send(cancel=LiveCancel())

    async def close(self) -> None:
        """Says that no frames and questions follow, and waits until all that was asked is answered."""
        if not self._closed:
            self._closed = True
            await asyncio.shield(self._write(LiveRequest(close=LiveClose())))
        await asyncio.wait([self._reading])
        if self._failure:
            raise self._failure

    async def _ask(
        self, question: str, transient: bool, sampling: Sampling
    ) -> AsyncGenerator[LiveDelta | LiveFinished]:
        """Sends a question, and yields the events of its answer."""
        name = next(self._names)
        ask, queue = live_ask(name, [question], transient, sampling), self._listen()
        self._questions[name] = question
        await self._send(ask=ask)
        while (event := await queue.get()) is not None:
            match event:
                case LiveDelta(ask_id=ask_id) if ask_id == name:
                    yield event
                case LiveFinished(ask_id=ask_id) if ask_id == name:
                    yield event
                    return
                case LiveRefused(ask_id=ask_id) if ask_id == name:
                    raise event.error
        raise self._failure or InvalidRequest("the live session was left before the question was answered")

    def _listen(self) -> asyncio.Queue[LiveEvent | None]:
        """The events from now on, then None. It gets them as long as someone has it."""
        queue: asyncio.Queue[LiveEvent | None] = asyncio.Queue()
        if self._reading.done():
            queue.put_nowait(None)
        self._listeners.add(queue)
        return queue

    async def _send(self, stamp: bool = False, **request: Any) -> None:
        """A cancelled caller leaves a request whole: gRPC takes none after a part of one."""
        if self._closed or self._reading.done():
            raise self._failure or InvalidRequest("the live session is closed")
        await asyncio.shield(self._write(LiveRequest(**request), stamp))

    async def _write(self, request: LiveRequest, stamp: bool = False) -> None:
        """stamp: it is a frame, which gets the time at which it is sent, so that times are in the order of sending."""
        async with self._writing:
            if stamp:
                request.frame.time_s = time.monotonic() - self._began
            await write_to(self._call, request)

    async def _read(self) -> None:
        """Gives every listener each event, and None at the end."""
        made = LiveEvents(self.request_id, self._questions)
        try:
            while (response := await self._next()) is not None:
                event = made.of(response)
                for queue in self._listeners:
                    queue.put_nowait(event)
                if isinstance(event, LiveFinished | LiveRefused) and event.ask_id.startswith("ask-"):
                    del self._questions[event.ask_id]
            if not self._closed:
                raise PeerContract("the live session ended before it was closed")
        except GridsieveError as error:
            self._failure = error
        finally:
            for queue in self._listeners:
                queue.put_nowait(None)

    async def _next(self) -> LiveResponse | None:
        """None at the end. Raises the error that the session ended with."""
        with python_remedies():
            response: LiveResponse | None = await read_from(self._call, "generation")
            return response

    async def _follow(self, queue: asyncio.Queue[LiveEvent | None]) -> AsyncGenerator[LiveEvent]:
        while (event := await queue.get()) is not None:
            yield event
        if self._failure:
            raise self._failure


def _raw(pixels: NDArray[np.uint8]) -> RawFrame:
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise InvalidRequest(
            f"must be uint8 [height, width, 3], got {pixels.dtype} {list(pixels.shape)}", field="frame.raw"
        )
    height, width, _ = pixels.shape
    return RawFrame(width=width, height=height, rgb=pixels.tobytes())
