"""Steps run on workers, a bounded way ahead of their reader, and end with it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator

import pytest

from services.preprocessing.threads import LOOKAHEAD, Workers


@pytest.fixture
async def workers() -> AsyncIterator[Workers]:
    made = Workers(1)
    yield made
    made.shut_down()


class Steps:
    """Counts up, remembers how far it came and whether it was closed."""

    def __init__(self, end: int, fails_at: int | None = None) -> None:
        self.made = 0
        self.closed = False
        self._end, self._fails_at = end, fails_at

    def run(self) -> Generator[int, None, None]:
        try:
            for number in range(self._end):
                if number == self._fails_at:
                    raise ValueError(f"step {number}")
                self.made += 1
                yield number
        finally:
            self.closed = True


async def settled(steps: Steps) -> int:
    """How many steps were made once no more are."""
    before = -1
    while before != steps.made:
        before = steps.made
        await asyncio.sleep(0.05)
    return steps.made


async def test_all_steps_come_in_order(workers: Workers) -> None:
    async with workers.ahead(Steps(20).run()) as taken:
        assert [number async for number in taken] == list(range(20))


async def test_a_slow_reader_stops_the_steps(workers: Workers) -> None:
    steps = Steps(100)
    async with workers.ahead(steps.run()) as taken:
        assert await settled(steps) == LOOKAHEAD
        assert await anext(taken) == 0
        assert await settled(steps) == LOOKAHEAD + 1
        # Nobody's worker is held meanwhile: the only one there is runs something else.
        assert await asyncio.wait_for(workers.call(lambda: "free"), 1) == "free"
    assert steps.closed


async def test_a_reader_that_leaves_ends_the_steps(workers: Workers) -> None:
    steps = Steps(100)
    async with workers.ahead(steps.run()) as taken:
        await anext(taken)
    made = steps.made
    assert steps.closed
    assert await settled(steps) == made


async def test_a_cancelled_reader_waits_for_the_running_step_and_closes(workers: Workers) -> None:
    started, may_end = threading.Event(), threading.Event()
    closed = []

    def slow() -> Generator[int, None, None]:
        try:
            started.set()
            may_end.wait(5)
            yield 0
        finally:
            closed.append(may_end.is_set())

    async def read() -> None:
        async with workers.ahead(slow()) as taken:
            async for _ in taken:
                pass

    task = asyncio.create_task(read())
    await asyncio.to_thread(started.wait, 5)
    task.cancel()
    await asyncio.sleep(0.05)
    assert not task.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert closed == [True]


async def test_a_step_that_fails_fails_its_reader_after_what_came_before(workers: Workers) -> None:
    steps = Steps(10, fails_at=3)
    numbers = []

    async def read() -> None:
        async with workers.ahead(steps.run()) as taken:
            async for number in taken:
                numbers.append(number)  # noqa: PERF401

    with pytest.raises(ValueError, match="step 3"):
        await read()
    assert numbers == [0, 1, 2]
    assert steps.closed
