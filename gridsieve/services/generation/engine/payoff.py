"""Whether drafting with a head pays: what it brings to a request, against what it costs a step.

    gain of a request    1 + a tokens a step instead of 1; a: its accepted draft tokens a step, a moving average
    cost of a step       seconds with drafts / seconds without, medians of the last steps in which about as many
                         sequences decode and no prompt is computed: with many sequences, drafts cost more than with few

A request drafts while its gain is above the cost, and a above LEAST_ACCEPTED. So that all of it stays known, of every
`PERIOD` steps of a size the first `ALONE` are computed without drafts, and in one all requests draft. It knows neither
the model nor torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from functools import partial
from statistics import median

from gridsieve.services.generation.request.request import Request

PERIOD, ALONE = 128, 3
# Steps that a median is of.
REMEMBERED = 9
# Of the last value in a moving average.
WEIGHT = 0.2
# A gain so small is less than what times of steps vary by.
LEAST_ACCEPTED = 0.05
# In place of a token that the head drafts before the step is launched.
UNKNOWN = -1


class Payoff:
    """Implements `Drafts` for a head: measures steps and requests, and proposes room for its tokens where they pay."""

    def __init__(self) -> None:
        # By size, with and without drafts.
        self._seconds = defaultdict[tuple[int, bool], deque[float]](partial(deque, maxlen=REMEMBERED))
        self._steps: Counter[int] = Counter()  # by size
        self._accepted: float | None = None  # of all requests, with which a new one begins

    def begin_step(self, sequences: int) -> None:
        self._size = sequences.bit_length()
        self._turn = self._steps[self._size] % PERIOD
        self._steps[self._size] += 1

    def propose(self, request: Request, limit: int) -> tuple[int, ...]:
        return (UNKNOWN,) * limit if self.pays(request) else ()

    def pays(self, request: Request) -> bool:
        """Whether a request should draft in this step."""
        if self._turn < ALONE or self._turn == PERIOD // 2:
            return self._turn >= ALONE
        with_drafts, without = (self._seconds[self._size, each] for each in (True, False))
        accepted = self._accepted if request.accepted_per_step is None else request.accepted_per_step
        if not with_drafts or not without or accepted is None:
            return True
        return accepted > LEAST_ACCEPTED and 1 + accepted > median(with_drafts) / median(without)

    def count_step(self, sequences: int, drafted: bool, seconds: float) -> None:
        """Counts a step in which all sequences decode."""
        self._seconds[sequences.bit_length(), drafted].append(seconds)

    def count_drafts(self, request: Request, accepted: int) -> None:
        """Counts the drafts of a request in a step."""
        before = self._accepted if request.accepted_per_step is None else request.accepted_per_step
        request.accepted_per_step = _average(before, accepted)
        self._accepted = _average(self._accepted, accepted)


def _average(before: float | None, value: float) -> float:
    return value if before is None else before + WEIGHT * (value - before)
