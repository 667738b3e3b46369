"""Questions that a live session asks by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gridsieve.services.generation.live.ask import Ask


@dataclass(frozen=True, slots=True)
class Trigger:
    """every_us: of the times of frames. on_change: the share of a slice's tokens. At least one of them is not None."""

    ask: Ask
    every_us: int | None = None
    on_change: float | None = None


@dataclass(slots=True)
class _Armed:
    """asked_us: the time of the slice after which it was asked last. last: the question as it was asked then."""

    trigger: Trigger
    asked_us: int = 0
    last: Ask | None = None


class Triggers:
    """The triggers of a session."""

    def __init__(self, triggers: Sequence[Trigger]) -> None:
        self._all = [_Armed(trigger) for trigger in triggers]

    def pulled(self, time_us: int, changed: float, asked: Sequence[Ask], room: int) -> Iterator[Ask]:
        """The questions to ask after a slice, the last one first; the first one is to be asked before the others.

        time_us: of the slice. changed: the share of its tokens that did. asked: questions that are not finished: their
        triggers are not pulled. room: how many more may be asked; the others are asked after a later slice.
        """
        for armed in reversed(self._all):
            trigger = armed.trigger
            due = trigger.every_us is not None and time_us - armed.asked_us >= trigger.every_us
            moved = trigger.on_change is not None and changed >= trigger.on_change
            if (due or moved) and armed.last not in asked and room > 0:
                armed.asked_us, armed.last = time_us, trigger.ask.again()
                room -= 1
                yield armed.last
