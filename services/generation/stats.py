"""What the engine does and has done, for whoever watches it. It knows neither metrics nor who asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.generation.request import Request
from services.generation.windows import Window


@dataclass(frozen=True, slots=True)
class EngineStats:
    """As of now. `*_since_ns`: when the longest such got so, on the monotonic clock. `*_total` only grow."""

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
    steps_total: int
    tokens_computed_total: int
    preemptions_total: int
    guesses_total: int
    right_guesses_total: int


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


def since_ns(requests: Sequence[Request]) -> int | None:
    """When the one that has been what it is for the longest became so."""
    return min((request.since_ns for request in requests), default=None)


def prompt_tokens(window: Window) -> int:
    """How many of a window's tokens are its prompt's."""
    return max(0, min(window.end, window.request.rope.tokens) - window.start)
