"""Questions that a live session asks by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gridsieve.services.generation.live.frames import microseconds
from gridsieve.services.generation.live.options import Ask
from gridsieve.v1 import generation_pb2


@dataclass(slots=True)
class _Trigger:
    """asked_us: the time of the slice after which it was asked last. last: the question as it was asked then."""

    message: generation_pb2.LiveTrigger
    asked_us: int = 0
    last: Ask | None = None


class Triggers:
    """The triggers of a session, which were checked."""

    def __init__(self, messages: Sequence[generation_pb2.LiveTrigger]) -> None:
        self._all = [_Trigger(message) for message in messages]

    def pulled(self, time_us: int, changed: float, asked: Sequence[Ask], room: int) -> Iterator[Ask]:
        """The questions to ask after a slice, the last one first; the first one is to be asked before the others.

        time_us: of the slice. changed: the share of its tokens that did. asked: questions that are not finished: their
        triggers are not pulled. room: how many more may be asked; the others are asked after a later slice.
        """
        for trigger in reversed(self._all):
            message = trigger.message
            due = message.HasField("every_s") and time_us - trigger.asked_us >= microseconds(message.every_s)
            moved = message.HasField("on_change") and changed >= message.on_change
            if (due or moved) and trigger.last not in asked and room > 0:
                trigger.asked_us, trigger.last = time_us, Ask.of(message.ask)
                room -= 1
                yield trigger.last
