"""What the engine does and has done, for whoever watches it. It knows neither metrics nor who asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.generation.engine.scheduler import Scheduler
from services.generation.request.batch import Window
from services.generation.request.request import Request


@dataclass(frozen=True, slots=True)
class Totals:
    """Up to the last step; they only grow. tokens: computed, of prompts and answers, with guesses."""

    tokens: int = 0
    preemptions: int = 0
    guesses: int = 0
    right_guesses: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computed, guesses among the tokens of answers, and how long it took."""

    seconds: float
    sequences: int
    prompt_tokens: int
    answer_tokens: int
    preemptions: int
    guesses: int
    right_guesses: int

    @classmethod
    def between(cls, before: Totals, after: Totals, windows: Sequence[Window], seconds: float) -> Step:
        """The step that ran `windows`."""
        prompt_tokens = sum(map(_prompt_tokens, windows))
        return cls(
            seconds=seconds,
            sequences=len(windows),
            prompt_tokens=prompt_tokens,
            answer_tokens=after.tokens - before.tokens - prompt_tokens,
            preemptions=after.preemptions - before.preemptions,
            guesses=after.guesses - before.guesses,
            right_guesses=after.right_guesses - before.right_guesses,
        )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """As of now, but for `totals`. `*_since_ns`: when the longest such got so, on the monotonic clock."""

    running: int
    waiting: int
    awaiting_media: int
    following: int
    running_since_ns: int | None
    waiting_since_ns: int | None
    awaiting_media_since_ns: int | None
    blocks_used: int
    blocks_idle: int
    blocks_total: int
    totals: Totals

    @classmethod
    def of(cls, scheduler: Scheduler, totals: Totals) -> EngineStats:
        return cls(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            awaiting_media=len(scheduler.awaiting_media),
            following=len(scheduler.following),
            running_since_ns=_since_ns(scheduler.running),
            waiting_since_ns=_since_ns(scheduler.waiting),
            awaiting_media_since_ns=_since_ns(scheduler.awaiting_media),
            blocks_used=scheduler.allocator.used,
            blocks_idle=scheduler.allocator.idle,
            blocks_total=scheduler.allocator.total,
            totals=totals,
        )


def _since_ns(requests: Sequence[Request]) -> int | None:
    """When the one that has been what it is for the longest became so."""
    return min((request.since_ns for request in requests), default=None)


def _prompt_tokens(window: Window) -> int:
    """How many of a window's tokens are its prompt's."""
    return max(0, min(window.end, window.request.rope.tokens) - window.start)
