"""A batcher that is closed, or given up, or ends with its device leaves nobody waiting, and takes no slice any more."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest
import torch

from common.contract.errors import Unavailable
from services.encoder.items.batcher import Batcher
from tests.encoder.stopped_tower import TIMEOUT_S, StoppedTower, run_all


@pytest.fixture
def tower() -> StoppedTower:
    return StoppedTower()


def test_closing_cancels_what_is_queued_and_waits_for_the_running_forward() -> None:
    tower = StoppedTower()
    batcher = Batcher(tower.encode, budget_tokens=10)
    running = batcher.submit(torch.tensor([1, 10]), torch.zeros(1, 10, 2))
    assert tower.started.acquire(timeout=TIMEOUT_S)
    queued = batcher.submit(torch.tensor([2, 10]), torch.zeros(1, 10, 2))
    closing = threading.Thread(target=batcher.close)
    closing.start()
    with pytest.raises(CancelledError):
        queued.result(TIMEOUT_S)
    assert closing.is_alive()
    tower.go.release()
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert running.done()
    assert tower.forwards == [[1]]


def test_a_slice_that_comes_right_before_the_end_is_cancelled(tower: StoppedTower) -> None:
    """Before the thread, which waits for one, has noticed either."""
    batcher = Batcher(tower.encode, budget_tokens=10)
    run_all(tower)
    batcher.submit(torch.tensor([0, 10]), torch.zeros(1, 10, 2)).result(TIMEOUT_S)
    with batcher._changed:
        late = batcher.submit(torch.tensor([1, 10]), torch.zeros(1, 10, 2))
        batcher._closing = True
    batcher.close()
    with pytest.raises(CancelledError):
        late.result(TIMEOUT_S)
    assert tower.forwards == [[0]]


def test_a_device_that_is_lost_ends_the_thread_and_leaves_nobody_waiting() -> None:
    tower = StoppedTower()
    batcher = Batcher(tower.encode, budget_tokens=10)
    lost, queued = (batcher.submit(torch.tensor([name, 10]), torch.zeros(1, 10, 2)) for name in (14, 1))
    assert batcher.alive
    tower.go.release()
    for failed in (lost, queued):
        with pytest.raises(Unavailable, match="ended"):
            failed.result(TIMEOUT_S)
    assert not batcher.alive
    with pytest.raises(Unavailable, match="ended"):
        batcher.submit(torch.tensor([2, 10]), torch.zeros(1, 10, 2))
    batcher.close()


@pytest.mark.parametrize("returns", [True, False])
def test_a_tower_that_is_given_up_leaves_nobody_waiting_whether_it_ever_returns(returns: bool) -> None:
    tower = StoppedTower()
    batcher = Batcher(tower.encode, budget_tokens=10)
    running = batcher.submit(torch.tensor([0, 10]), torch.zeros(1, 10, 2))
    assert tower.started.acquire(timeout=TIMEOUT_S)
    queued = batcher.submit(torch.tensor([1, 10]), torch.zeros(1, 10, 2))
    if returns:
        tower.go.release()
        running.result(TIMEOUT_S)
        assert tower.started.acquire(timeout=TIMEOUT_S)
    batcher.abort(Unavailable("rank 3 is gone", "encoder"))
    for failed in (queued,) if returns else (running, queued):
        with pytest.raises(Unavailable, match="rank 3 is gone"):
            failed.result(TIMEOUT_S)
    assert not batcher.alive
    with pytest.raises(Unavailable, match="rank 3 is gone"):
        batcher.submit(torch.tensor([2, 10]), torch.zeros(1, 10, 2))
    run_all(tower)
    batcher.close()
    assert tower.forwards == ([[0], [1]] if returns else [[0]])


def test_a_tower_that_is_given_up_while_slices_are_run_alone_leaves_nobody_waiting(tower: StoppedTower) -> None:
    batcher = Batcher(tower.encode, budget_tokens=10)
    busy, first, running, last = (
        batcher.submit(torch.tensor([name, tokens]), torch.zeros(1, tokens, 2))
        for name, tokens in ((0, 10), (15, 3), (1, 3), (2, 3))
    )
    for each in (busy, first):
        for _ in range(1 if each is busy else 2):
            tower.go.release()
        each.result(TIMEOUT_S)
    for _ in range(4):
        assert tower.started.acquire(timeout=TIMEOUT_S)
    batcher.abort(Unavailable("rank 3 is gone", "encoder"))
    for failed in (running, last):
        with pytest.raises(Unavailable, match="rank 3 is gone"):
            failed.result(TIMEOUT_S)
    run_all(tower)
    batcher.close()
    assert first.exception() is None
