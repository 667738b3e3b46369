"""One camera: a live session that preprocessing's frames come to, opened again after growing waits whatever ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TypeAlias

from gridsieve.client.client import GridsieveClient
from gridsieve.client.live import LiveSession
from gridsieve.client.live_events import (
    DropReason,
    LiveDropped,
    LiveEvent,
    LiveFinished,
    LiveRefused,
    LiveSlice,
    LiveStream,
    StreamState,
)
from gridsieve.common.contract.errors import GridsieveError
from gridsieve.watch.cameras import Camera
from gridsieve.watch.events import Event, answered, lost, playing
from gridsieve.watch.waits import growing_s

_LOSSES = {
    DropReason.UNAVAILABLE: "preprocessing or the encoder cannot be reached",
    DropReason.NO_ROOM: "a service has no room for them",
}

Record: TypeAlias = Callable[[str, LiveSlice], None]


class Watching:
    """tell: takes what happens. say: takes lines for people, about what no event is made of. record: takes the camera's
    name and each slice."""

    def __init__(
        self,
        client: GridsieveClient,
        camera: Camera,
        tell: Callable[[Event], None],
        say: Callable[[str], None],
        record: Record | None = None,
    ) -> None:
        self._client, self._camera, self._tell, self._say, self._record = client, camera, tell, say, record
        self._ending = asyncio.Event()
        # What was told last: not told again before the camera plays, or a question is answered.
        self._lost = self._complained = ""

    def end(self) -> None:
        """Lets `run` return once what was asked is answered."""
        self._ending.set()

    async def run(self) -> None:
        camera = self._camera
        self._say(f"{camera.name}: opens {camera.address}")
        waits = growing_s()
        while not self._ending.is_set():
            try:
                async with self._client.live(**camera.options) as session:
                    closing = asyncio.create_task(self._close(session))
                    try:
                        async for event in session.events():
                            self._take(event)
                            if isinstance(event, LiveSlice):
                                waits = growing_s()
                            elif isinstance(event, LiveStream) and event.state is StreamState.ENDED:
                                await session.close()
                    finally:
                        closing.cancel()
            except GridsieveError as error:
                self._lose(_in_words(error))
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), next(waits))

    async def _close(self, session: LiveSession) -> None:
        await self._ending.wait()
        with suppress(GridsieveError):  # the session's events raise it, too
            await session.close()

    def _take(self, event: LiveEvent) -> None:
        match event:
            case LiveSlice():
                if self._record:
                    self._record(self._camera.name, event)
            case LiveFinished():
                self._complained = ""
                self._tell(answered(self._camera, event))
            case LiveStream(state=StreamState.PLAYING):
                self._lost = ""
                self._tell(playing(self._camera))
            case LiveStream():
                self._lose(_in_words(event.reason) if event.reason else "the camera ended the stream")
            case LiveRefused():
                self._complain(f"not answered: {event.question}: {_in_words(event.error)}")
            case LiveDropped() if event.reason in _LOSSES or event.error:
                self._complain(f"frames are dropped: {event.error or _LOSSES[event.reason]}")

    def _lose(self, reason: str) -> None:
        if self._lost != reason:
            self._lost = reason
            self._tell(lost(self._camera, reason))

    def _complain(self, text: str) -> None:
        if self._complained != text:
            self._complained = text
            self._say(f"{self._camera.name}: {text}")


def _in_words(error: GridsieveError | str) -> str:
    """The error of a live session in words of a file of cameras."""
    return str(error).replace("open.source", "the camera").removeprefix("open.")
