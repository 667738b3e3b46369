"""The batcher: slices in order up to the budget, failures confined to their forward, and every way in which it ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from common.contract.errors import Unavailable
from services.encoder.items.batcher import Batcher, ForwardTimes
from services.encoder.tower.graph_buckets import PackingLimit, Size
from tests.encoder.gated_tower import BUG, LOST_DEVICE, TIMEOUT_S, TOO_LARGE, TOO_LARGE_WITH_OTHERS, GatedTower

Submit = Callable[[int, int], tuple[Future[ForwardTimes], Tensor]]


@pytest.fixture
def tower() -> GatedTower:
    return GatedTower()


@pytest.fixture
def batcher(tower: GatedTower) -> Iterator[Batcher]:
    batcher = Batcher(tower.encode, budget_tokens=10)
    yield batcher
    tower.open()
    batcher.close()


@pytest.fixture
def submit(tower: GatedTower, batcher: Batcher) -> Submit:
    """Submits a slice by name and tokens, to a batcher whose tower is busy with slice 0."""

    def submit_slice(name: int, tokens: int) -> tuple[Future[ForwardTimes], Tensor]:
        target = torch.zeros(1, tokens, 2)
        return batcher.submit(torch.tensor([name, tokens]), target), target

    submit_slice(0, 1)
    assert tower.started.acquire(timeout=TIMEOUT_S)
    return submit_slice


# --- batches ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slices", "forwards"),
    [
        # 5 would have fitted beside 1 and 2, and does not overtake 3.
        ([(1, 4), (2, 4), (3, 4), (4, 6), (5, 1)], [[1, 2], [3, 4], [5]]),
        ([(1, 2), (2, 25), (3, 2)], [[1], [2], [3]]),  # a slice above the budget runs alone
    ],
)
def test_slices_are_packed_in_order_up_to_the_budget(
    tower: GatedTower, submit: Submit, slices: list[tuple[int, int]], forwards: list[list[int]]
) -> None:
    submitted = {name: submit(name, tokens) for name, tokens in slices}
    tower.open()
    for name, (encoded, target) in submitted.items():
        encoded.result(TIMEOUT_S)
        assert (target == name).all()
    assert tower.forwards == [[0], *forwards]


def test_slices_and_windows_limit_a_batch_too(tower: GatedTower) -> None:
    """A slice has as many windows as numbers after its name."""
    packing = PackingLimit(Size(100, 3, 7), lambda shape: Size(1, 1, shape[0] - 1))
    batcher = Batcher(tower.encode, budget_tokens=100, packing=packing)

    def submit_slice(name: int, windows: int) -> Future[ForwardTimes]:
        return batcher.submit(torch.tensor([name, 1, *[0] * (windows - 1)]), torch.zeros(1, 1, 2))

    submitted = [submit_slice(0, 1)]
    assert tower.started.acquire(timeout=TIMEOUT_S)
    submitted += [submit_slice(name, windows) for name, windows in enumerate((2, 2, 2, 1, 3, 3, 2, 9, 1), start=1)]
    tower.open()
    for encoded in submitted:
        encoded.result(TIMEOUT_S)
    batcher.close()
    assert tower.forwards == [[0], [1, 2, 3], [4, 5, 6], [7], [8], [9]]


def test_a_queued_slice_can_be_cancelled_and_a_running_one_cannot(tower: GatedTower, submit: Submit) -> None:
    (first, target), (second, untouched), (third, _) = (
        submit(name, tokens) for name, tokens in ((1, 9), (2, 2), (3, 9))
    )
    tower.open(1)
    assert tower.started.acquire(timeout=TIMEOUT_S)
    assert not first.cancel()
    assert second.cancel()
    tower.open()
    first.result(TIMEOUT_S)
    third.result(TIMEOUT_S)
    with pytest.raises(CancelledError):
        second.result(TIMEOUT_S)
    assert tower.forwards == [[0], [1], [3]]
    assert (target == 1).all()
    assert (untouched == 0).all()


def test_a_batch_whose_slices_were_all_cancelled_at_the_last_moment_is_skipped(
    tower: GatedTower, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled, and not yet removed from the queue."""
    monkeypatch.setattr(Batcher, "_withdraw", lambda batcher, encoded: None)
    cancelled = [submit(name, 10)[0] for name in (1, 2)]
    assert all(each.cancel() for each in cancelled)
    tower.open()
    submit(3, 10)[0].result(TIMEOUT_S)
    assert tower.forwards == [[0], [3]]


def test_the_queue_and_the_age_of_its_first_slice_are_reported(tower: GatedTower, batcher: Batcher) -> None:
    submitted = [batcher.submit(torch.tensor([0, 1]), torch.zeros(1, 1, 2))]
    assert tower.started.acquire(timeout=TIMEOUT_S)
    assert (batcher.queued, batcher.oldest_ns) == (0, None)  # a running slice is not queued
    moments_ns = []
    for name in (1, 2):
        moments_ns.append(time.monotonic_ns())
        submitted.append(batcher.submit(torch.tensor([name, 1]), torch.zeros(1, 1, 2)))
    assert batcher.queued == 2
    assert batcher.oldest_ns is not None
    assert moments_ns[0] <= batcher.oldest_ns <= moments_ns[1]
    submitted[1].cancel()
    assert batcher.queued == 1
    assert batcher.oldest_ns is not None
    assert batcher.oldest_ns >= moments_ns[1]
    tower.open()
    submitted[2].result(TIMEOUT_S)
    assert (batcher.queued, batcher.oldest_ns) == (0, None)


def test_slices_get_the_times_of_their_forward(tower: GatedTower, submit: Submit) -> None:
    before_ns = time.monotonic_ns()
    (first, _), (second, _) = submit(1, 5), submit(2, 6)
    tower.open()
    forwards = [first.result(TIMEOUT_S), second.result(TIMEOUT_S)]
    moments = [moment for forward in forwards for moment in (forward.begun_ns, forward.ended_ns)]
    assert moments == sorted(moments)
    assert before_ns < moments[0] < moments[-1] < time.monotonic_ns()


def test_forwards_run_on_the_device_of_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device of a new thread is cuda:0."""
    current: list[Tensor] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    found: list[Tensor] = []

    def encode(slices: Sequence[Tensor]) -> list[Tensor]:
        found.extend(current)
        return [torch.ones(1, 2, 2)]

    batcher, target = Batcher(encode, budget_tokens=10), torch.zeros(1, 2, 2)
    batcher.submit(torch.zeros(1), target).result(TIMEOUT_S)
    batcher.close()
    assert found[0] is target


def test_an_idle_batcher_holds_no_target(tower: GatedTower, submit: Submit) -> None:
    encoded, target = submit(1, 3)
    tower.open()
    encoded.result(TIMEOUT_S)
    held = weakref.ref(target)
    del encoded, target
    deadline_s = time.monotonic() + TIMEOUT_S
    while held() is not None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert held() is None


# --- failures ---------------------------------------------------------------------------------------------------


def test_a_failing_forward_fails_only_its_own_slices(tower: GatedTower, submit: Submit) -> None:
    (beside, _), (unlucky, _), (after, target) = submit(1, 5), submit(BUG, 5), submit(2, 5)
    tower.open()
    for failed in (beside, unlucky):
        with pytest.raises(RuntimeError, match="unlucky"):
            failed.result(TIMEOUT_S)
    after.result(TIMEOUT_S)
    assert (target == 2).all()


def test_slices_that_run_out_of_memory_together_run_one_at_a_time(tower: GatedTower, submit: Submit) -> None:
    slices = ((1, 3), (TOO_LARGE_WITH_OTHERS, 3), (TOO_LARGE, 3), (2, 1), (3, 5), (4, 5))
    submitted = {name: submit(name, tokens) for name, tokens in slices}
    tower.open()
    with pytest.raises(torch.OutOfMemoryError, match="none is left"):
        submitted.pop(TOO_LARGE)[0].result(TIMEOUT_S)
    for name, (encoded, target) in submitted.items():
        encoded.result(TIMEOUT_S)
        assert (target == name).all()
    assert tower.forwards == [[0], [1, 15, 16, 2], [1], [15], [16], [2], [3, 4]]  # 3 and 4 together again


def test_tensors_of_a_forward_that_ran_out_of_memory_are_freed_at_once(tower: GatedTower, submit: Submit) -> None:
    """Without the collector, before the slices run again, and although their error is kept."""
    gc.disable()
    try:
        (beside, _), (large, _) = submit(1, 3), submit(TOO_LARGE, 3)
        tower.open(1)
        for _ in range(2):
            assert tower.started.acquire(timeout=TIMEOUT_S)
            tower.open(1)
        assert tower.forwards == [[0], [1, 16], [1]]
        assert [made() for made in tower.made] == [None]
        tower.open()
        beside.result(TIMEOUT_S)
        assert isinstance(large.exception(TIMEOUT_S), torch.OutOfMemoryError)
        assert [made() for made in tower.made] == [None, None]
    finally:
        gc.enable()


# --- its end ----------------------------------------------------------------------------------------------------


def test_closing_cancels_queued_slices_and_waits_for_the_running_forward(tower: GatedTower) -> None:
    batcher = Batcher(tower.encode, budget_tokens=10)
    running = batcher.submit(torch.tensor([1, 10]), torch.zeros(1, 10, 2))
    assert tower.started.acquire(timeout=TIMEOUT_S)
    queued = batcher.submit(torch.tensor([2, 10]), torch.zeros(1, 10, 2))
    closing = threading.Thread(target=batcher.close)
    closing.start()
    with pytest.raises(CancelledError):
        queued.result(TIMEOUT_S)
    assert closing.is_alive()
    tower.open(1)
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    assert running.done()
    assert tower.forwards == [[1]]


def test_a_slice_submitted_right_before_closing_is_cancelled(tower: GatedTower) -> None:
    """The waiting thread has noticed neither the slice nor the closing."""
    batcher = Batcher(tower.encode, budget_tokens=10)
    with batcher._changed:
        late = batcher.submit(torch.tensor([1, 10]), torch.zeros(1, 10, 2))
        batcher._closing = True
    batcher.close()
    with pytest.raises(CancelledError):
        late.result(TIMEOUT_S)
    assert tower.forwards == []


def test_a_lost_device_fails_all_slices_and_ends_the_thread(tower: GatedTower) -> None:
    batcher = Batcher(tower.encode, budget_tokens=10)
    lost, queued = (batcher.submit(torch.tensor([name, 10]), torch.zeros(1, 10, 2)) for name in (LOST_DEVICE, 1))
    assert batcher.alive
    tower.open(1)
    for failed in (lost, queued):
        with pytest.raises(Unavailable, match="ended"):
            failed.result(TIMEOUT_S)
    assert not batcher.alive
    with pytest.raises(Unavailable, match="ended"):
        batcher.submit(torch.tensor([2, 10]), torch.zeros(1, 10, 2))
    batcher.close()


@pytest.mark.parametrize("slices_alone", [False, True])
def test_aborting_fails_all_slices_although_the_forward_does_not_return(tower: GatedTower, slices_alone: bool) -> None:
    """Also while slices that ran out of memory together run one at a time."""
    batcher = Batcher(tower.encode, budget_tokens=10)
    name, forwards = (TOO_LARGE_WITH_OTHERS, 4) if slices_alone else (1, 2)
    done, first, running, queued = (
        batcher.submit(torch.tensor([each, tokens]), torch.zeros(1, tokens, 2))
        for each, tokens in ((0, 10), (name, 3), (2, 7 if slices_alone else 8), (3, 3))
    )
    for _ in range(forwards - 1):
        assert tower.started.acquire(timeout=TIMEOUT_S)
        tower.open(1)
    assert tower.started.acquire(timeout=TIMEOUT_S)
    batcher.abort(Unavailable("rank 3 is gone", "encoder"))
    for failed in (running, queued) if slices_alone else (first, running, queued):
        with pytest.raises(Unavailable, match="rank 3 is gone"):
            failed.result(TIMEOUT_S)
    assert done.exception() is None
    assert not slices_alone or first.exception() is None
    assert not batcher.alive
    with pytest.raises(Unavailable, match="rank 3 is gone"):
        batcher.submit(torch.tensor([4, 10]), torch.zeros(1, 10, 2))
    tower.open()
    batcher.close()
