"""When a load generator asks: a closed loop of clients, or arrivals of a Poisson process.

    closed  each client asks its next question as soon as its last is answered: a slow server is asked less
    open    questions arrive when they arrive, however many are still unanswered

It knows nothing of questions, servers or statistics. All times are the event loop's clock, in seconds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

Ask: TypeAlias = Callable[[int, float], Awaitable[None]]
"""Asks the question of this number, which was due at this time, and returns once it is answered or has failed."""


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is asked: this many questions, or all that begin within this many seconds. Exactly one is set."""

    requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        assert (self.requests is None) != (self.duration_s is None)

    def holds(self, number: int, after_s: float) -> bool:
        """Whether the question of this number, counted from 0, may still begin this long after the first."""
        return number < self.requests if self.requests is not None else after_s < (self.duration_s or 0)


def poisson_arrivals(rate: float, seed: int, extent: Extent) -> Iterator[float]:
    """When questions arrive, in seconds since the start: gaps are exponential with mean 1 / rate, and the seed's own.

    rate: questions a second, above 0.
    """
    rng = Random(seed)  # noqa: S311  (no secret)
    after_s = 0.0
    for number in itertools.count():
        after_s += rng.expovariate(rate)
        if not extent.holds(number, after_s):
            return
        yield after_s


async def closed_loop(ask: Ask, clients: int, extent: Extent) -> None:
    """Never more than `clients` questions at once; returns once the last is answered. A question is due when asked."""
    clock = asyncio.get_running_loop().time
    began_s = clock()
    numbers = itertools.count()

    async def client() -> None:
        while extent.holds(number := next(numbers), clock() - began_s):
            await ask(number, clock())

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())


async def open_loop(ask: Ask, arrivals: Iterable[float]) -> None:
    """Asks at each arrival, however many are unanswered; returns once the last is answered.

    A question is due when it arrives, not when this process comes round to asking it: latencies counted from there
    hold the time that a question waits, wherever it waits (else the omission is coordinated with the server).
    """
    clock = asyncio.get_running_loop().time
    began_s = clock()
    async with asyncio.TaskGroup() as group:
        for number, after_s in enumerate(arrivals):
            await asyncio.sleep(began_s + after_s - clock())
            group.create_task(_asked(ask, number, began_s + after_s))


async def _asked(ask: Ask, number: int, due_s: float) -> None:
    await ask(number, due_s)
