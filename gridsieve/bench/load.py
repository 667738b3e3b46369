"""When requests are sent: a closed loop of clients, or an open loop with Poisson arrivals.

    closed  each client sends its next request when the previous one is answered: a slow server receives fewer
    open    requests arrive at given times, no matter how many are still unanswered

It knows nothing of questions, servers or statistics. All times are the event loop's clock, in seconds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any, TypeAlias

Ask: TypeAlias = Callable[[int, float], Coroutine[Any, Any, None]]
"""Sends request `number`, due at `due_s`, and returns when it is answered or has failed."""


@dataclass(frozen=True, slots=True)
class Extent:
    """The size of a load: a number of requests, or all that begin within a duration. Exactly one is set."""

    requests: int | None = None
    duration_s: float | None = None

    def __post_init__(self) -> None:
        assert (self.requests is None) != (self.duration_s is None)

    def holds(self, number: int, after_s: float) -> bool:
        """Whether request `number` (from 0) may still begin `after_s` seconds after the start."""
        return number < self.requests if self.requests is not None else after_s < (self.duration_s or 0)


def poisson_arrivals(rate: float, seed: int, extent: Extent) -> Iterator[float]:
    """Arrival times in seconds since the start. Gaps are exponential with mean 1 / rate and determined by the seed.

    A number of requests arrives within exactly requests / rate seconds: the gaps are scaled to that sum, as in
    `vllm bench serve`, so that a short load has the rate that was asked for.
    rate: requests per second, above 0.
    """
    rng = Random(seed)  # noqa: S311  (not used for security)
    if extent.requests is not None:
        gaps = [rng.expovariate(rate) for _ in range(extent.requests)]
        scale = extent.requests / rate / sum(gaps)
        yield from itertools.accumulate(gap * scale for gap in gaps)
        return
    after_s = rng.expovariate(rate)
    while extent.holds(0, after_s):
        yield after_s
        after_s += rng.expovariate(rate)


async def closed_loop(ask: Ask, clients: int, extent: Extent) -> None:
    """Keeps `clients` requests running; returns when the last is answered. A request is due when it is sent."""
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
    """Sends a request at each arrival time, no matter how many are unanswered; returns when the last is answered.

    A request is due at its arrival time, not when this process gets to send it. Latencies counted from then include
    all waiting, on either side, which avoids coordinated omission.
    """
    clock = asyncio.get_running_loop().time
    began_s = clock()
    async with asyncio.TaskGroup() as group:
        for number, after_s in enumerate(arrivals):
            await asyncio.sleep(began_s + after_s - clock())
            group.create_task(ask(number, began_s + after_s))
