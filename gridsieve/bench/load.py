"""When requests are sent: a closed loop of clients, or an open loop with Poisson arrivals.

    closed  each client sends its next request when the previous one is answered: a slow server receives fewer
    open    requests arrive at given times, no matter how many are still unanswered

It knows nothing of questions, servers or statistics. All times are the event loop's clock, in seconds.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Iterable, Iterator
from random import Random
from typing import Any, TypeAlias

Ask: TypeAlias = Callable[[int, float], Coroutine[Any, Any, None]]
"""Sends request `number`, due at `due_s`, and returns when it is answered or has failed."""


def poisson_arrivals(rate: float, requests: int) -> Iterator[float]:
    """Arrival times in seconds since the start, the same in every run. Gaps are exponential with mean 1 / rate.

    The requests arrive within exactly requests / rate seconds: the gaps are scaled to that sum, as in
    `vllm bench serve`, so that a short load has the rate that was asked for.
    rate: requests per second, above 0.
    """
    rng = Random(0)  # noqa: S311  (not used for security)
    gaps = [rng.expovariate(rate) for _ in range(requests)]
    scale = requests / rate / sum(gaps)
    return itertools.accumulate(gap * scale for gap in gaps)


async def closed_loop(ask: Ask, clients: int, requests: int) -> None:
    """Keeps `clients` requests running; returns when the last is answered. A request is due when it is sent."""
    clock = asyncio.get_running_loop().time
    numbers = iter(range(requests))

    async def client() -> None:
        for number in numbers:
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
