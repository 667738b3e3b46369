"""Where the time to the first token went. Each instant belongs to the earliest stage that is not finished.

    finished at:  fetch 0 · plan 3 · decode 9 · encode 7 · prune 9 · transfer 10 · first token 14
    0 ── plan ── 3 ──────── decode ──────── 9 ─ transfer ─ 10 ── prefill ── 14      the others: 0

So the stages sum to the time to the first token even where they overlap. Whole nanoseconds of one clock of one host:
sums are exact. What other hosts did is told as how long ago it was, and placed on this clock by when that was heard, so
no two hosts' clocks are compared. It knows nothing of what the stages do.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from time import monotonic_ns


class Stage(IntEnum):
    """In the order in which a request goes through them."""

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
        """Notes that a stage was not needed, nor any earlier one."""
        self.finish(stage, self._start_ns)

    def finish(self, stage: Stage, at_ns: int | None = None) -> None:
        """Notes that a stage is finished, and with it every earlier one. What was noted before stands.

        at_ns: when, if not now. A time before the request, or before an earlier stage's, is that one's.
        """
        at_ns = self._clock_ns() if at_ns is None else at_ns
        for each in Stage:
            if each <= stage:
                self._finished_ns.setdefault(each, at_ns)

    def token(self, at_ns: int) -> bool:
        """Notes a token, and returns whether it was the first, with which every stage is finished."""
        first = self._last_ns is None
        self._last_ns = at_ns
        self.finish(Stage.PREFILL, at_ns)
        return first

    def intervals_ns(self) -> dict[Stage, tuple[int, int]]:
        """When each stage that is finished began and ended, each as the one before it ended."""
        intervals: dict[Stage, tuple[int, int]] = {}
        end = self._start_ns
        for stage, finished in sorted(self._finished_ns.items()):
            began, end = end, min(max(finished, end), self._finished_ns.get(Stage.PREFILL, finished))
            intervals[stage] = (began, end)
        return intervals

    def stages_ns(self) -> dict[Stage, int]:
        """How long each stage took, once the first token is there; they sum to `first_token_ns` exactly."""
        return {stage: end - began for stage, (began, end) in self.intervals_ns().items()}

    @property
    def first_token_ns(self) -> int:
        return self._finished_ns[Stage.PREFILL] - self._start_ns

    @property
    def generate_ns(self) -> int:
        """From the first token to the last."""
        assert self._last_ns is not None
        return self._last_ns - self._finished_ns[Stage.PREFILL]
