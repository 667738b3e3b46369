"""A question of a live session, and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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

    def again(self) -> Ask:
        """The same question, asked once more."""
        return replace(self, cancelled=asyncio.Event())


@dataclass(frozen=True, slots=True)
class Answer:
    """text: without what was not sent when it was cancelled. ended: None: it was cancelled. prompt_tokens: with the
    rows that the session held before the question (held_tokens)."""

    text: str
    ended: Ended | None
    prompt_tokens: int
    held_tokens: int
    completion_tokens: int
    clock: StageClock
