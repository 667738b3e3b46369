"""Whether drafting pays: what it brings to a step, against what it costs the step.

    gain of a step    1 + Σ a / sequences tokens of each instead of 1; a: the moving average of a request's
                      accepted draft tokens a step; the sum is over requests that draft
    cost of a step    seconds with drafts / seconds without, medians of the last steps in which about as many sequences
                      decode and no prompt is computed. Drafts cost more with many sequences than with few, and where a
                      device computes beside the host, a step with drafts waits for the host

A step has drafts while its gain is above the cost, and a request drafts while its a is above LEAST_ACCEPTED. So that
all of it stays known, of every `PERIOD` steps of a size the first `ALONE` are computed without drafts, and in one all
requests draft. It knows neither the model nor torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from functools import partial
from math import inf
from statistics import median

from gridsieve.services.generation.engine.speculation import Drafts
from gridsieve.services.generation.request.request import Request

PERIOD, ALONE = 128, 3
# Steps that a median is of.
REMEMBERED = 9
# Of the last value in a moving average.
WEIGHT = 0.2
# A gain so small is less than what times of steps vary by.
LEAST_ACCEPTED = 0.05


class Payoff:
    """Implements `Drafts`: measures steps and requests, and proposes other drafts where they pay."""

    def __init__(self, drafts: Drafts) -> None:
        self._drafts = drafts
        # By size, with and without drafts.
        self._seconds = defaultdict[tuple[int, bool], deque[float]](partial(deque, maxlen=REMEMBERED))
        self._steps: Counter[int] = Counter()  # by size
        self._accepted: float | None = None  # of all requests, with which a new one begins

    def propose(self, limits: Mapping[Request, int]) -> dict[Request, tuple[int, ...]]:
        turn = self._steps[len(limits).bit_length()] % PERIOD
        if turn < ALONE:
            return {}
        if turn == PERIOD // 2:
            return self._drafts.propose(limits)
        hopeful = {request: limit for request, limit in limits.items() if self._expected(request) > LEAST_ACCEPTED}
        found = {request: tokens for request, tokens in self._drafts.propose(hopeful).items() if tokens}
        with_drafts, without = (self._seconds[len(limits).bit_length(), each] for each in (True, False))
        if len(with_drafts) < ALONE or not without:  # the first step with drafts may be slow
            return found
        gain = 1 + sum(map(self._expected, found)) / len(limits)
        return found if gain > median(with_drafts) / median(without) else {}

    def begin_step(self, sequences: int) -> None:
        self._steps[sequences.bit_length()] += 1

    def count_step(self, sequences: int, drafted: bool, seconds: float) -> None:
        """Counts a step in which all sequences decode."""
        self._seconds[sequences.bit_length(), drafted].append(seconds)

    def count_drafts(self, request: Request, accepted: int) -> None:
        """Counts the drafts of a request in a step."""
        request.accepted_per_step = _average(self._average_of(request), accepted)
        self._accepted = _average(self._accepted, accepted)

    def _expected(self, request: Request) -> float:
        """Accepted draft tokens of its next step; of the first request of all: any number."""
        average = self._average_of(request)
        return inf if average is None else average

    def _average_of(self, request: Request) -> float | None:
        return self._accepted if request.accepted_per_step is None else request.accepted_per_step


def _average(before: float | None, value: float) -> float:
    return value if before is None else before + WEIGHT * (value - before)
