"""The batcher: what is there, in order, up to the budget; a failure or a cancelled slice touches nobody else.

How it ends is `test_batcher_end.py`'s.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from services.encoder.items.batcher import Batcher, ForwardTimes
from services.encoder.tower.graph_buckets import PackingLimit, Size
from tests.encoder.stopped_tower import TIMEOUT_S, StoppedTower, run_all


@pytest.fixture
def tower() -> StoppedTower:
    return StoppedTower()


@pytest.fixture
def submit(tower: StoppedTower) -> Iterator[Callable[[int, int], tuple[Future[ForwardTimes], Tensor]]]:
    """Submits a slice by name and tokens to a batcher with a budget of 10, whose tower is busy with slice 0."""
    batcher = Batcher(tower.encode, budget_tokens=10)

    def submit_slice(name: int, tokens: int) -> tuple[Future[ForwardTimes], Tensor]:
        target = torch.zeros(1, tokens, 2)
        return batcher.submit(torch.tensor([name, tokens]), target), target

    submit_slice(0, 1)
    assert tower.started.acquire(timeout=TIMEOUT_S)
    yield submit_slice
    for _ in range(20):
        tower.go.release()
    batcher.close()


Submit = Callable[[int, int], tuple[Future[ForwardTimes], Tensor]]


def test_slices_are_packed_in_their_order_up_to_the_budget(tower: StoppedTower, submit: Submit) -> None:
    submitted = [submit(name, tokens) for name, tokens in ((1, 4), (2, 4), (3, 4), (4, 6), (5, 1))]
    run_all(tower)
    for encoded, _ in submitted:
        encoded.result(TIMEOUT_S)
    # 5 would have fitted beside 1 and 2, and does not overtake 3.
    assert tower.forwards == [[0], [1, 2], [3, 4], [5]]


def test_embeddings_reach_their_own_target(tower: StoppedTower, submit: Submit) -> None:
    submitted = {name: submit(name, 3) for name in (1, 2, 3)}
    run_all(tower)
    for name, (encoded, target) in submitted.items():
        encoded.result(TIMEOUT_S)
        assert (target == name).all()


def test_a_slice_above_the_budget_has_a_forward_to_itself(tower: StoppedTower, submit: Submit) -> None:
    submitted = [submit(name, tokens) for name, tokens in ((1, 2), (2, 25), (3, 2))]
    run_all(tower)
    for encoded, _ in submitted:
        encoded.result(TIMEOUT_S)
    assert tower.forwards == [[0], [1], [2], [3]]


def test_slices_and_windows_end_a_batch_where_they_count(tower: StoppedTower) -> None:
    """The name of a slice is followed by as many numbers as it has windows."""
    packing = PackingLimit(Size(100, 3, 7), lambda shape: Size(1, 1, shape[0] - 1))
    batcher = Batcher(tower.encode, budget_tokens=100, packing=packing)

    def submit_slice(name: int, windows: int) -> Future[ForwardTimes]:
        return batcher.submit(torch.tensor([name, 1, *[0] * (windows - 1)]), torch.zeros(1, 1, 2))

    submitted = [submit_slice(0, 1)]
    assert tower.started.acquire(timeout=TIMEOUT_S)
    submitted += [submit_slice(name, windows) for name, windows in enumerate((2, 2, 2, 1, 3, 3, 2, 9, 1), start=1)]
    run_all(tower)
    for encoded in submitted:
        encoded.result(TIMEOUT_S)
    batcher.close()
    assert tower.forwards == [[0], [1, 2, 3], [4, 5, 6], [7], [8], [9]]


def test_a_cancelled_slice_is_never_encoded(tower: StoppedTower, submit: Submit) -> None:
    (first, _), (second, untouched), (third, _) = (submit(name, 2) for name in (1, 2, 3))
    assert second.cancel()
    run_all(tower)
    first.result(TIMEOUT_S)
    third.result(TIMEOUT_S)
    with pytest.raises(CancelledError):
        second.result(TIMEOUT_S)
    assert tower.forwards == [[0], [1, 3]]
    assert (untouched == 0).all()


def test_a_batch_whose_slices_were_all_cancelled_at_the_last_moment_is_none(
    tower: StoppedTower, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled, and not yet taken out of the queue."""
    monkeypatch.setattr(Batcher, "_withdraw", lambda batcher, encoded: None)
    cancelled = [submit(name, 10)[0] for name in (1, 2)]
    assert all(each.cancel() for each in cancelled)
    run_all(tower)
    submit(3, 10)[0].result(TIMEOUT_S)
    assert tower.forwards == [[0], [3]]


def test_a_slice_whose_forward_runs_is_not_cancelled(tower: StoppedTower, submit: Submit) -> None:
    running, target = submit(1, 3)
    tower.go.release()
    assert tower.started.acquire(timeout=TIMEOUT_S)
    assert not running.cancel()
    run_all(tower)
    running.result(TIMEOUT_S)
    assert (target == 1).all()
    submit(2, 3)[0].result(TIMEOUT_S)


def test_a_failing_forward_fails_its_own_slices_alone(tower: StoppedTower, submit: Submit) -> None:
    (beside, _), (unlucky, _), (after, target) = submit(1, 5), submit(13, 5), submit(2, 5)
    run_all(tower)
    for failed in (beside, unlucky):
        with pytest.raises(RuntimeError, match="unlucky"):
            failed.result(TIMEOUT_S)
    after.result(TIMEOUT_S)
    assert (target == 2).all()


def test_slices_that_lack_memory_together_are_run_one_at_a_time_and_those_behind_them_are_not(
    tower: StoppedTower, submit: Submit
) -> None:
    submitted = {name: submit(name, tokens) for name, tokens in ((1, 3), (15, 3), (2, 3), (3, 5), (4, 5))}
    run_all(tower)
    for name, (encoded, target) in submitted.items():
        encoded.result(TIMEOUT_S)
        assert (target == name).all()
    assert tower.forwards == [[0], [1, 15, 2], [1], [15], [2], [3, 4]]


def test_a_slice_that_lacks_memory_by_itself_fails_alone(tower: StoppedTower, submit: Submit) -> None:
    (before, first), (large, _), (behind, last) = submit(1, 3), submit(16, 3), submit(2, 3)
    run_all(tower)
    with pytest.raises(torch.OutOfMemoryError, match="none is left"):
        large.result(TIMEOUT_S)
    for encoded in (before, behind):
        encoded.result(TIMEOUT_S)
    assert ((first == 1).all(), (last == 2).all()) == (True, True)
    assert tower.forwards == [[0], [1, 16, 2], [1], [16], [2]]


def test_nothing_that_a_forward_without_memory_had_made_is_held(tower: StoppedTower, submit: Submit) -> None:
    """Neither while its slices are run again nor by what they are told, and it does not take the collector."""
    gc.disable()
    try:
        (beside, _), (large, _) = submit(1, 3), submit(16, 3)
        tower.go.release()
        for _ in range(2):
            assert tower.started.acquire(timeout=TIMEOUT_S)
            tower.go.release()
        assert tower.forwards == [[0], [1, 16], [1]]
        assert [made() for made in tower.made] == [None]
        run_all(tower)
        beside.result(TIMEOUT_S)
        assert isinstance(large.exception(TIMEOUT_S), torch.OutOfMemoryError)
        assert [made() for made in tower.made] == [None, None]
    finally:
        gc.enable()


def test_forwards_run_on_the_device_of_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with the first device as its own, whatever the service's is."""
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


def test_an_idle_batcher_holds_nothing_of_what_it_encoded(tower: StoppedTower, submit: Submit) -> None:
    encoded, target = submit(1, 3)
    run_all(tower)
    encoded.result(TIMEOUT_S)
    held = weakref.ref(target)
    del encoded, target
    deadline_s = time.monotonic() + TIMEOUT_S
    while held() is not None and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert held() is None


def test_those_that_wait_are_told_and_since_when_the_first_of_them(tower: StoppedTower) -> None:
    batcher = Batcher(tower.encode, budget_tokens=10)
    submitted = [batcher.submit(torch.tensor([0, 1]), torch.zeros(1, 1, 2))]
    assert tower.started.acquire(timeout=TIMEOUT_S)
    assert (batcher.queued, batcher.oldest_ns) == (0, None)  # what runs does not wait
    before_ns = time.monotonic_ns()
    submitted.append(batcher.submit(torch.tensor([1, 1]), torch.zeros(1, 1, 2)))
    between_ns = time.monotonic_ns()
    submitted.append(batcher.submit(torch.tensor([2, 1]), torch.zeros(1, 1, 2)))
    assert batcher.queued == 2
    assert batcher.oldest_ns is not None
    assert before_ns <= batcher.oldest_ns <= between_ns
    submitted[1].cancel()
    assert batcher.queued == 1
    assert batcher.oldest_ns is not None
    assert batcher.oldest_ns >= between_ns
    run_all(tower)
    submitted[2].result(TIMEOUT_S)
    assert (batcher.queued, batcher.oldest_ns) == (0, None)
    batcher.close()


def test_slices_are_told_when_their_forward_began_and_ended(tower: StoppedTower, submit: Submit) -> None:
    before_ns = time.monotonic_ns()
    (first, _), (second, _) = submit(1, 5), submit(2, 6)
    run_all(tower)
    forwards = [first.result(TIMEOUT_S), second.result(TIMEOUT_S)]
    moments = [moment for forward in forwards for moment in (forward.begun_ns, forward.ended_ns)]
    assert moments == sorted(moments)
    assert before_ns < moments[0] < moments[-1] < time.monotonic_ns()
