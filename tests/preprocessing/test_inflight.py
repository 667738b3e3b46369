"""Jobs share the bytes in flight evenly, and each may always make one piece."""

from __future__ import annotations

import asyncio

import pytest

from services.preprocessing.workers.job_queue import InFlightBudget, Share

MIB = 2**20


def taken(share: Share) -> int:
    """How many more pieces there is room for."""
    pieces = 0
    while share.try_acquire():
        pieces += 1
    return pieces


def test_one_job_may_hold_everything() -> None:
    assert taken(InFlightBudget(10 * MIB).share(3 * MIB)) == 3


def test_jobs_hold_the_same_number_of_bytes() -> None:
    budget = InFlightBudget(12 * MIB)
    small, large = budget.share(MIB), budget.share(3 * MIB)
    assert (taken(small), taken(large)) == (6, 2)


def test_the_budget_holds_while_one_job_has_more_than_its_share() -> None:
    budget = InFlightBudget(8 * MIB)
    early = budget.share(MIB)
    for _ in range(7):
        assert early.try_acquire()
    late = budget.share(MIB)
    assert taken(late) == 1
    assert taken(early) == 0
    early.release()
    assert taken(early) == 0  # six are still more than its half
    assert taken(late) == 1


def test_whoever_holds_nothing_may_make_one_piece_however_large() -> None:
    budget = InFlightBudget(MIB)
    assert [taken(budget.share(5 * MIB)) for _ in range(3)] == [1, 1, 1]
    assert budget.held_bytes == 15 * MIB


@pytest.mark.parametrize("piece_bytes", [0, 1, MIB])
def test_small_pieces_are_few(piece_bytes: int) -> None:
    assert taken(InFlightBudget(16 * MIB).share(piece_bytes)) == 16


async def test_who_waits_goes_on_when_another_gives_or_leaves() -> None:
    budget = InFlightBudget(2 * MIB)
    first, second = budget.share(MIB), budget.share(MIB)
    assert (taken(first), taken(second)) == (1, 1)
    waiting = asyncio.create_task(second.acquire())
    await asyncio.sleep(0)
    assert not waiting.done()
    first.close()
    await asyncio.wait_for(waiting, 1)
    again = asyncio.create_task(second.acquire())
    await asyncio.sleep(0)
    assert not again.done()
    second.release()
    await asyncio.wait_for(again, 1)
    second.close()
    assert (budget.held_bytes, budget.shares) == (0, 0)
