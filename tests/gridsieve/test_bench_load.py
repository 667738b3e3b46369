"""Closed and open loops of requests, and the latencies recorded of one request; on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import statistics
from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

import pytest

from gridsieve.bench.load import closed_loop, open_loop, poisson_arrivals
from gridsieve.bench.measure import Record, timed
from gridsieve.bench.workload import Workload
from gridsieve.client.answer import Delta, Event, Finished, FinishReason, Timings, Usage
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Message, Options, Pruning, Text
from gridsieve.common.contract.errors import Overloaded
from tests.gridsieve.instant_loop import run


def test_arrivals_are_exponential_and_the_same_in_every_run() -> None:
    arrivals = list(poisson_arrivals(4.0, 20_000))
    assert arrivals == list(poisson_arrivals(4.0, 20_000))
    gaps = [after - before for before, after in itertools.pairwise([0.0, *arrivals])]
    # An exponential's mean and standard deviation are 1 / rate; four standard errors of each.
    assert statistics.fmean(gaps) == pytest.approx(0.25, rel=4 / 20_000**0.5)
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=4 * 2 / 20_000**0.5)


def test_a_number_of_requests_arrives_at_the_rate() -> None:
    for requests in (1, 7, 50):
        arrivals = list(poisson_arrivals(2.0, requests))
        assert len(arrivals) == requests
        assert arrivals[-1] == pytest.approx(requests / 2.0)


def test_a_closed_loop_keeps_exactly_its_clients_busy() -> None:
    flying, seen, numbers = 0, [], []

    async def ask(number: int, due_s: float) -> None:
        nonlocal flying
        assert due_s == asyncio.get_running_loop().time()
        flying += 1
        seen.append(flying)
        numbers.append(number)
        await asyncio.sleep(1 + number % 3)
        flying -= 1

    run(closed_loop(ask, 4, 40))
    assert numbers == list(range(40))
    # After the first requests, a client sends one as soon as its last is answered.
    assert seen[:4] == [1, 2, 3, 4]
    assert max(seen) == 4


def test_a_stalled_server_delays_every_request_that_was_due_meanwhile() -> None:
    """The first request takes 30 s. A closed loop would see one slow request, the open loop sees all that were due."""
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


def test_a_stall_of_the_load_generator_counts_as_latency() -> None:
    due_s, late_s = [], []

    async def ask(number: int, due: float) -> None:
        loop = asyncio.get_running_loop()
        due_s.append(due - 100)
        late_s.append(loop.time() - due)
        if number == 0:
            loop.now += 20  # the whole process stalls

    run(open_loop(ask, [0.0, 5.0, 10.0, 30.0]))
    assert due_s == pytest.approx([0, 5, 10, 30])
    assert late_s == pytest.approx([0, 15, 10, 0])


# --- one request ------------------------------------------------------------------------------------------------

USAGE = Usage(prompt_tokens_full=100, prompt_tokens=40, completion_tokens=3, media=())
FINISHED = Finished(0, FinishReason.LENGTH, USAGE, Timings(0.1, 0, 0.1, 0, 0, 0, 0, 0, 0, 0, 0, generate_s=0.1))
ANSWER: list[Finished | int | float] = [0.15, 1, 0.2, 2, 0.05, FINISHED]


class FakeClient:
    """Sleeps at a float, sends a message of as many tokens at an int, raises at an exception."""

    def __init__(self, script: list[Any]) -> None:
        self.script = script

    async def events(self, messages: Sequence[Message], options: Options) -> AsyncGenerator[Event]:
        for step in self.script:
            if isinstance(step, float):
                await asyncio.sleep(step)
            elif isinstance(step, int):
                yield Delta(0, "", (7,) * step, ())
            elif isinstance(step, Exception):
                raise step
            else:
                yield step


async def measured(client: FakeClient, *, late_s: float = 0.0, began_ago_s: float = 10.0) -> Record:
    """late_s: how long ago the request was due."""
    now_s = asyncio.get_running_loop().time()
    asked, options = Workload(((Text("?"),),)), Options(max_new_tokens=64, timeout_s=9.0)
    pruning, fake = Pruning(0.5, "random"), cast(GridsieveClient, client)
    return await timed(fake, 4, asked, pruning, now_s - late_s, now_s - began_ago_s, options)


def test_latencies_count_from_when_a_request_was_due() -> None:
    record = run(measured(FakeClient(ANSWER), late_s=2.0))
    assert (record.number, record.pruning, record.failure) == (4, Pruning(0.5, "random"), None)
    assert (record.due_s, record.begun_s) == pytest.approx((8.0, 10.0), abs=1e-6)
    assert record.first_token_s == pytest.approx(2.15, abs=1e-6)
    assert record.token_gaps_s == pytest.approx((0.1, 0.1), abs=1e-6)
    assert record.time_per_output_token_s == pytest.approx((0.2 + 0.05) / 2, abs=1e-6)
    assert record.total_s == pytest.approx(2.4, abs=1e-6)
    assert (record.usage, record.timings) == (USAGE, FINISHED.timings)


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ([0.15, 1, Overloaded("the queue is full")], ("RESOURCE_EXHAUSTED", "OVERLOADED", "the queue is full")),
        ([OSError(2, "No such file", "clip.mp4")], ("CLIENT", "FILE", "clip.mp4: No such file")),
    ],
    ids=["rejected midway", "missing file"],
)
def test_a_failed_request_has_a_reason_and_no_token_times(script: list[Any], told: tuple[str, ...]) -> None:
    record = run(measured(FakeClient(script)))
    assert record.failure is not None
    assert (record.failure.status, record.failure.reason, record.failure.message) == told
    assert (record.first_token_s, record.token_gaps_s, record.usage, record.timings) == (None, (), None, None)
