"""The stages of the time to first token. Each instant belongs to the earliest stage that has not finished.

    finished at:  fetch 0 · plan 3 · decode 9 · encode 7 · prune 9 · transfer 10 · first token 14
    0 ── plan ── 3 ──────── decode ──────── 9 ─ transfer ─ 10 ── prefill ── 14      all other stages: 0

The stages therefore sum to the time to first token even where they overlap. All times are integer nanoseconds of this
host's monotonic clock, so the sums are exact. Other hosts report how long ago something happened; that age is
subtracted from the local time of receipt, so clocks of two hosts are never compared. This module does not know what
the stages do.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from time import monotonic_ns

from gridsieve.common.telemetry.tracing import record


class Stage(IntEnum):
    """In the order in which a request passes through them."""

    FETCH = 0
    PLAN = 1
    DECODE = 2
    RESIZE = 3
    WAIT_FOR_ENCODER = 4
    ENCODE = 5
    PRUNE = 6
    TRANSFER = 7
    WAIT_FOR_PREFILL = 8
    PREFILL = 9


# The stages that happen in this service; the services upstream record spans for the others.
_OWN_STAGES = (Stage.TRANSFER, Stage.WAIT_FOR_PREFILL, Stage.PREFILL)


class StageClock:
    """The stages of one request, from its arrival."""

    def __init__(self, clock_ns: Callable[[], int] = monotonic_ns) -> None:
        self._clock_ns = clock_ns
        self._start_ns = clock_ns()
        self._finished_ns: dict[Stage, int] = {}
        self._last_ns: int | None = None

    def now_ns(self) -> int:
        return self._clock_ns()

    def skip(self, stage: Stage) -> None:
        """Records that this stage and all earlier ones were not needed. Stages already finished keep their times."""
        self.finish(stage, self._start_ns)

    def finish(self, stage: Stage, at_ns: int | None = None) -> None:
        """Records the end of a stage and of every earlier one. Stages already finished keep their times.

        at_ns: defaults to now. A time before the request, or before the end of an earlier stage, counts as that time.
        """
        at_ns = self._clock_ns() if at_ns is None else at_ns
        for each in Stage:
            if each <= stage:
                self._finished_ns.setdefault(each, at_ns)

    def token(self, at_ns: int) -> bool:
        """Records a token. Returns whether it was the first, which finishes every stage."""
        first = self._last_ns is None
        self._last_ns = at_ns
        if first:
            self.finish(Stage.PREFILL, at_ns)
        return first

    def intervals_ns(self) -> dict[Stage, tuple[int, int]]:
        """Start and end of every finished stage; a stage starts where the one before it ends."""
        intervals: dict[Stage, tuple[int, int]] = {}
        end = self._start_ns
        for stage, finished in sorted(self._finished_ns.items()):
            began, end = end, min(max(finished, end), self._finished_ns.get(Stage.PREFILL, finished))
            intervals[stage] = (began, end)
        return intervals

    def stages_ns(self) -> dict[Stage, int]:
        """Duration of each stage, once the first token was recorded; they sum to `first_token_ns` exactly."""
        return {stage: end - began for stage, (began, end) in self.intervals_ns().items()}

    @property
    def first_token_ns(self) -> int:
        return self._finished_ns[Stage.PREFILL] - self._start_ns

    @property
    def generate_ns(self) -> int:
        """From the first token to the last."""
        assert self._last_ns is not None
        return self._last_ns - self._finished_ns[Stage.PREFILL]


def record_stages(clock: StageClock, error: BaseException | None = None) -> None:
    """Records trace spans of this service's stages after the request has ended.

    Each request gets its own spans, because a step of the engine computes parts of many requests. Stages that took no
    time get no span. error: what interrupted the last stage, if anything did.
    """
    intervals = clock.intervals_ns()
    for stage in _OWN_STAGES:
        began_ns, ended_ns = intervals.get(stage, (0, 0))
        if ended_ns > began_ns:
            record(stage.name.lower(), began_ns, ended_ns)
    if Stage.PREFILL in intervals:
        _, began_ns = intervals[Stage.PREFILL]
        record("generate", began_ns, clock.now_ns() if error else began_ns + clock.generate_ns, error)
        return
    unfinished = next(stage for stage in Stage if stage not in intervals)
    if unfinished in _OWN_STAGES:
        _, began_ns = intervals[Stage(unfinished - 1)]
        record(unfinished.name.lower(), began_ns, clock.now_ns(), error)
