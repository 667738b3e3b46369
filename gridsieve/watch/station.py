"""All cameras of a file: each is watched by itself, and what it tells goes to every sink.

    file ─▶ Watched ─▶ Watching, one a camera ─▶ Event ─▶ Outbox, one a sink ─▶ webhook, broker, stdout

The file is looked at every second. When it has changed, and no longer changes, it is read; cameras and sinks that are
equal in it go on as they are, the others are ended and begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gridsieve.client.client import GridsieveClient
from gridsieve.common.contract.errors import StartupError
from gridsieve.watch.cameras import Camera, Mqtt, Sink, Stdout, Watched, Webhook, stamped
from gridsieve.watch.events import Event
from gridsieve.watch.mqtt import MqttSender
from gridsieve.watch.outbox import Outbox, Sender
from gridsieve.watch.stdout import StdoutSender
from gridsieve.watch.watching import Record, Watching
from gridsieve.watch.webhook import WebhookSender

_LOOK_S = 1.0
# At the end, and where a camera or a sink has changed: for questions that were asked, and for events that wait.
_END_S = 4.0


@dataclass(frozen=True, slots=True)
class _Running:
    camera: Camera
    watching: Watching
    task: asyncio.Task[None]


class Station:
    """read: reads the file, or raises StartupError. tell: takes every event. say: takes lines for people. record: takes
    the name of a camera and each slice of it."""

    def __init__(
        self,
        client: GridsieveClient,
        read: Callable[[], Watched],
        tell: Callable[[Event], None],
        say: Callable[[str], None],
        record: Record | None = None,
    ) -> None:
        self._client, self._read, self._tell, self._say, self._record = client, read, tell, say, record
        self._cameras: dict[str, _Running] = {}
        self._sinks: list[tuple[Sink, Outbox]] = []
        self._dropped = 0

    async def run(self, watched: Watched, ending: asyncio.Event) -> int:
        """Watches until `ending`. Returns how many events no sink took."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            await self._take(watched)
            seen, refused = watched.files, ""
            while not await _within(ending, _LOOK_S):
                before, seen = seen, stamped(watched.files)
                if seen != before or seen == watched.files:
                    continue
                try:
                    watched = self._read()
                except StartupError as error:
                    if str(error) != refused:
                        self._say(f"the change is not taken over: {error}")
                    refused = str(error)
                    continue
                self._say("the change is taken over")
                refused = ""
                await self._take(watched)
            await self._end(list(self._cameras.values()))
            await self._close([outbox for _, outbox in self._sinks])
        return self._dropped

    async def _take(self, watched: Watched) -> None:
        """Ends what is not in the file any more, and begins what is new in it."""
        wanted = {each.name: each for each in watched.cameras}
        gone = [each for name, each in self._cameras.items() if wanted.get(name) != each.camera]
        await self._end(gone)
        old, self._sinks = self._sinks, []
        for sink in watched.sinks:
            kept = next((each for each in old if each[0] == sink), None)
            if kept:
                old.remove(kept)
            self._sinks.append(kept or (sink, self._outbox(sink)))
        if old:
            self._group.create_task(self._close([outbox for _, outbox in old]))
        for each in gone:
            del self._cameras[each.camera.name]
        for name, camera in wanted.items():
            if name not in self._cameras:
                watching = Watching(self._client, camera, self._event, self._say, self._record)
                self._cameras[name] = _Running(camera, watching, self._group.create_task(watching.run()))

    def _outbox(self, sink: Sink) -> Outbox:
        sender: Sender
        match sink:
            case Webhook():
                sender = WebhookSender(sink)
            case Mqtt():
                sender = MqttSender(sink, lambda why: outbox.failed(f"events wait: {why}"))
            case Stdout():
                sender = StdoutSender()
        outbox = Outbox(sender, sink.snapshot, self._say, self._group)
        return outbox

    def _event(self, event: Event) -> None:
        self._tell(event)
        for _, outbox in self._sinks:
            outbox.put(event)

    async def _end(self, cameras: list[_Running]) -> None:
        for each in cameras:
            each.watching.end()
        if cameras:
            tasks = [each.task for each in cameras]
            _, late = await asyncio.wait(tasks, timeout=_END_S)
            for task in late:
                task.cancel()
            await asyncio.wait(tasks)

    async def _close(self, outboxes: list[Outbox]) -> None:
        dropped = await asyncio.gather(*(each.close(_END_S) for each in outboxes))
        self._dropped += sum(dropped)  # not in the line above: it would forget what others add while it waits


async def _within(event: asyncio.Event, seconds: float) -> bool:
    """Whether an event happens within so many seconds."""
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
