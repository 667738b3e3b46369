"""When a load generator asks: clients in a closed loop, Poisson arrivals, and lateness that cannot hide."""

from __future__ import annotations

import asyncio
import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from client.bench_load import Extent, closed_loop, open_loop, poisson_arrivals


@given(rate=st.floats(0.01, 1000), seed=st.integers(0, 2**31), requests=st.integers(1, 50))
def test_arrivals_are_the_seeds_own_and_come_in_order(rate: float, seed: int, requests: int) -> None:
    first, second = (list(poisson_arrivals(rate, seed, Extent(requests))) for _ in range(2))
    assert first == second
    assert len(first) == requests
    assert first[0] > 0
    assert first == sorted(first)
    assert first != list(poisson_arrivals(rate, seed + 1, Extent(requests)))


def test_gaps_between_arrivals_are_exponential() -> None:
    arrivals = [0.0, *poisson_arrivals(4.0, 7, Extent(20_000))]
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    # An exponential's mean and standard deviation are 1 / rate; four standard errors of each.
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=4 / 20_000**0.5)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=4 * 2 / 20_000**0.5)
    assert sum(gap > 0.5 for gap in gaps) / 20_000 == pytest.approx(2.718281828**-2, rel=0.1)


def test_arrivals_end_with_the_time() -> None:
    arrivals = list(poisson_arrivals(100.0, 3, Extent(duration_s=5)))
    assert arrivals == list(poisson_arrivals(100.0, 3, Extent(1000)))[: len(arrivals)]
    assert len(arrivals) == pytest.approx(500, abs=4 * 500**0.5)
    assert arrivals[-1] < 5


@pytest.mark.parametrize(("clients", "requests"), [(1, 5), (4, 40), (8, 3)])
async def test_a_closed_loop_keeps_every_client_busy_and_never_more(clients: int, requests: int) -> None:
    flying, seen, numbers = 0, [], []

    async def ask(number: int, due_s: float) -> None:
        nonlocal flying
        flying += 1
        seen.append(flying)
        numbers.append(number)
        await asyncio.sleep(0.001 * (number % 3))
        flying -= 1

    await closed_loop(ask, clients, Extent(requests))
    assert numbers == list(range(requests))
    assert max(seen) == min(clients, requests)
    # Once all have begun, one asks as soon as another's answer is there.
    assert set(seen[clients:]) <= {clients - 1, clients} - {0}
    assert flying == 0


async def test_a_closed_loop_begins_nothing_after_its_time_but_waits_for_what_runs() -> None:
    loop = asyncio.get_running_loop()
    began_s, begun, ended = loop.time(), [], []

    async def ask(number: int, due_s: float) -> None:
        begun.append(due_s - began_s)
        await asyncio.sleep(0.04)
        ended.append(loop.time() - began_s)

    await closed_loop(ask, 2, Extent(duration_s=0.1))
    assert max(begun) < 0.1 < max(ended)
    assert len(begun) == len(ended) == 6


async def test_an_open_loop_asks_on_while_nothing_is_answered() -> None:
    flying, release = 0, asyncio.Event()

    async def ask(number: int, due_s: float) -> None:
        nonlocal flying
        flying += 1
        if flying == 20:
            release.set()
        await release.wait()

    async with asyncio.timeout(5):
        await open_loop(ask, poisson_arrivals(1000.0, 0, Extent(20)))


async def test_a_server_that_stalls_shows_it_in_every_question_that_was_due_meanwhile() -> None:
    """One question at a time, the first one slow: a closed loop would count one slow answer, here all ten are late."""
    loop = asyncio.get_running_loop()
    one_at_a_time = asyncio.Lock()
    latencies_s: dict[int, float] = {}

    async def ask(number: int, due_s: float) -> None:
        async with one_at_a_time:
            await asyncio.sleep(0.3 if number == 0 else 0)
        latencies_s[number] = loop.time() - due_s

    await open_loop(ask, [0.02 * number for number in range(10)])
    for number in range(10):
        assert latencies_s[number] == pytest.approx(0.3 - 0.02 * number, abs=0.1), number
    assert statistics.median(latencies_s.values()) > 0.15


async def test_a_stall_of_the_generator_itself_counts_too() -> None:
    import time

    loop = asyncio.get_running_loop()
    due: list[float] = []
    late_s: list[float] = []

    async def ask(number: int, due_s: float) -> None:
        due.append(due_s)
        late_s.append(loop.time() - due_s)
        if number == 0:
            time.sleep(0.2)  # the whole process stands still

    await open_loop(ask, [0.0, 0.05, 0.1])
    assert [after - due[0] for after in due] == pytest.approx([0.0, 0.05, 0.1])
    assert late_s[0] < 0.05
    assert late_s[1] == pytest.approx(0.15, abs=0.05)
    assert late_s[2] == pytest.approx(0.1, abs=0.05)
