"""Questions of a live session, those that it asks by itself among them, and their answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gridsieve.services.generation.answers.text import Ended
from gridsieve.services.generation.sampling.params import SamplingRequest
from gridsieve.services.generation.stage_clock import StageClock


@dataclass(frozen=True, slots=True, eq=False)
class Ask:
    """A question. wanted: how its answer is sampled. cancelled: set once it is to end."""

    id: str
    texts: Sequence[str]
    wanted: SamplingRequest
    transient: bool
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(frozen=True, slots=True)
class Answer:
    """text, thought: without what was not sent when it was cancelled. ended: None: it was cancelled. prompt_tokens:
    with the rows that the session held before the question (held_tokens)."""

    text: str
    thought: str
    ended: Ended | None
    prompt_tokens: int
    held_tokens: int
    completion_tokens: int
    clock: StageClock


@dataclass(slots=True)
class Trigger:
    """A question that a session asks by itself, again and again.

    every_us: of the times of frames. on_change: the share of a slice's tokens. At least one of them is not None.
    asked_us: the time of the slice after which it was asked last. last: the question as it was asked then.
    """

    ask: Ask
    every_us: int | None = None
    on_change: float | None = None
    asked_us: int = 0
    last: Ask | None = None


def pulled(triggers: Sequence[Trigger], time_us: int, changed: float, asked: Sequence[Ask], room: int) -> Iterator[Ask]:
    """The questions to ask after a slice, the last one first; the first one is to be asked before the others.

    time_us: of the slice. changed: the share of its tokens that did. asked: questions that are not finished: their
    triggers are not pulled. room: how many more may be asked; the others are asked after a later slice.
    """
    for trigger in reversed(triggers):
        due = trigger.every_us is not None and time_us - trigger.asked_us >= trigger.every_us
        moved = trigger.on_change is not None and changed >= trigger.on_change
        if (due or moved) and trigger.last not in asked and room > 0:
            trigger.asked_us, trigger.last = time_us, replace(trigger.ask, cancelled=asyncio.Event())
            room -= 1
            yield trigger.last
