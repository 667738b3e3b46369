"""When a load generator asks: clients in a closed loop, Poisson arrivals, and lateness that cannot hide."""

from __future__ import annotations

import asyncio
import itertools
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from framesieve.bench.load import Extent, closed_loop, open_loop, poisson_arrivals
from tests.preprocessing.instant_loop import run


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
def test_a_closed_loop_keeps_every_client_busy_and_never_more(clients: int, requests: int) -> None:
    flying, seen, numbers = 0, [], []

    async def ask(number: int, due_s: float) -> None:
        nonlocal flying
        assert due_s == asyncio.get_running_loop().time()
        flying += 1
        seen.append(flying)
        numbers.append(number)
        await asyncio.sleep(1 + number % 3)
        flying -= 1

    run(closed_loop(ask, clients, Extent(requests)))
    assert numbers == list(range(requests))
    # Once all have begun, one asks as soon as it is answered, and finds the others at it or just done.
    assert seen[:clients] == list(range(1, min(clients, requests) + 1))
    assert max(seen) == min(clients, requests)
    assert flying == 0


def test_a_closed_loops_clients_do_not_wait_for_each_other() -> None:
    async def seconds() -> float:
        async def ask(number: int, due_s: float) -> None:
            await asyncio.sleep(10 if number == 0 else 1)

        began_s = asyncio.get_running_loop().time()
        await closed_loop(ask, 2, Extent(11))
        return asyncio.get_running_loop().time() - began_s

    assert run(seconds()) == pytest.approx(10)


def test_a_closed_loop_begins_nothing_after_its_time_but_waits_for_what_runs() -> None:
    begun, ended = [], []

    async def ask(number: int, due_s: float) -> None:
        begun.append(due_s - 100)
        await asyncio.sleep(4)
        ended.append(asyncio.get_running_loop().time() - 100)

    run(closed_loop(ask, 2, Extent(duration_s=10)))
    assert begun == [0, 0, 4, 4, 8, 8]
    assert ended == [4, 4, 8, 8, 12, 12]


def test_an_open_loop_asks_on_while_nothing_is_answered() -> None:
    flying, release = 0, asyncio.Event()

    async def ask(number: int, due_s: float) -> None:
        nonlocal flying
        flying += 1
        if flying == 20:
            release.set()
        await release.wait()

    run(asyncio.wait_for(open_loop(ask, poisson_arrivals(1.0, 0, Extent(20))), timeout=1000))


def test_a_server_that_stalls_shows_it_in_every_question_that_was_due_meanwhile() -> None:
    """One at a time, the first for 30 s: a closed loop would count one slow answer, here all that were due are late."""
    latencies_s: dict[int, float] = {}

    async def load() -> None:
        one_at_a_time = asyncio.Lock()

        async def ask(number: int, due_s: float) -> None:
            async with one_at_a_time:
                await asyncio.sleep(30 if number == 0 else 0)
            latencies_s[number] = asyncio.get_running_loop().time() - due_s

        await open_loop(ask, [2.0 * number for number in range(20)])

    run(load())
    assert latencies_s == pytest.approx({number: max(30 - 2.0 * number, 0) for number in range(20)})


def test_a_stall_of_the_generator_itself_counts_too() -> None:
    due_s, late_s = [], []

    async def ask(number: int, due: float) -> None:
        loop = asyncio.get_running_loop()
        due_s.append(due - 100)
        late_s.append(loop.time() - due)
        if number == 0:
            loop.now += 20  # the whole process stands still

    run(open_loop(ask, [0.0, 5.0, 10.0, 30.0]))
    assert due_s == pytest.approx([0, 5, 10, 30])
    assert late_s == pytest.approx([0, 15, 10, 0])
