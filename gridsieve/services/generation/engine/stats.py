"""Figures of the engine: one step, and its state now. It knows nothing of metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gridsieve.services.generation.engine.scheduler import Scheduler
from gridsieve.services.generation.request.batch import Chunk
from gridsieve.services.generation.request.request import Request


@dataclass(frozen=True, slots=True)
class Step:
    """What one step computed and how long it took. answer_tokens: draft tokens included. replayed: whether a graph
    computed it."""

    seconds: float
    sequences: int
    prompt_tokens: int
    answer_tokens: int
    preemptions: int
    draft_tokens: int
    accepted_draft_tokens: int
    replayed: bool

    @classmethod
    def of(
        cls, chunks: Sequence[Chunk], accepted_draft_tokens: int, preemptions: int, seconds: float, replayed: bool
    ) -> Step:
        """The step that computed `chunks`."""
        prompt_tokens = sum(
            min(chunk.end, chunk.request.prompt.tokens) - chunk.start
            for chunk in chunks
            if chunk.start < chunk.request.prompt.tokens
        )
        return cls(
            seconds=seconds,
            sequences=len(chunks),
            prompt_tokens=prompt_tokens,
            answer_tokens=sum(chunk.tokens for chunk in chunks) - prompt_tokens,
            preemptions=preemptions,
            draft_tokens=sum(chunk.num_draft_tokens for chunk in chunks),
            accepted_draft_tokens=accepted_draft_tokens,
            replayed=replayed,
        )


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The queues and the caches now.

    states_used, snapshots, states_total: slots of recurrent states that requests hold, that are kept for prefix cache
    hits, and all; 0 for models without any.
    sessions: live sessions that are open.

    *_since_ns: since when the longest-standing request of a queue has its status, on the monotonic clock.
    """

    running: int
    waiting: int
    awaiting_media: int
    awaiting_sibling: int
    running_since_ns: int | None
    waiting_since_ns: int | None
    awaiting_media_since_ns: int | None
    blocks_used: int
    blocks_idle: int
    blocks_total: int
    states_used: int
    snapshots: int
    states_total: int
    sessions: int

    @classmethod
    def of(cls, scheduler: Scheduler) -> EngineStats:
        allocator, states = scheduler.memory.allocator, scheduler.memory.states
        return cls(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            awaiting_media=len(scheduler.awaiting_media),
            awaiting_sibling=len(scheduler.awaiting_sibling),
            running_since_ns=_since_ns(scheduler.running),
            waiting_since_ns=_since_ns(scheduler.waiting),
            awaiting_media_since_ns=_since_ns(scheduler.awaiting_media),
            blocks_used=allocator.used,
            blocks_idle=allocator.idle,
            blocks_total=allocator.total,
            states_used=states.used if states else 0,
            snapshots=states.snapshots if states else 0,
            states_total=states.total if states else 0,
            sessions=len(scheduler.memory.leases) - len(scheduler.opening),
        )


def _since_ns(requests: Sequence[Request]) -> int | None:
    return min((request.since_ns for request in requests), default=None)
