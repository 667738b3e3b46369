"""The batcher: slices in order up to the budget, failures confined to their forward, and every way in which it ends."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from gridsieve.common.contract.errors import Unavailable
from gridsieve.common.yielding import begin_call
from gridsieve.services.encoder.items.batcher import Batcher, ForwardTimes
from gridsieve.services.encoder.tower.sound import Sound
from tests.encoder.gated_tower import BUG, TIMEOUT_S, TOO_LARGE, TOO_LARGE_WITH_OTHERS, GatedTower, limit_of

Submitted = tuple[Future[ForwardTimes], Tensor]
Submit = Callable[[int, int], Submitted]


@pytest.fixture
def tower() -> GatedTower:
    return GatedTower()


@pytest.fixture
def batcher(tower: GatedTower) -> Iterator[Batcher]:
    batcher = Batcher(tower.encode, limit_of(10))
    batcher.start()
    yield batcher
    tower.open()
    batcher.close()


def submitted(batcher: Batcher, name: int, tokens: int, adapter: bytes = b"") -> Submitted:
    target = torch.zeros(1, tokens, 2)
    return batcher.submit(torch.tensor([name, tokens]), target, adapter=adapter), target


@pytest.fixture
def submit(tower: GatedTower, batcher: Batcher) -> Submit:
    """Submits a slice by name and tokens, to a batcher whose tower is busy with slice 0."""
    submitted(batcher, 0, 1)
    assert tower.begun()
    return lambda name, tokens: submitted(batcher, name, tokens)


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
    found = {name: submit(name, tokens) for name, tokens in slices}
    tower.open()
    for name, (encoded, target) in found.items():
        encoded.result(TIMEOUT_S)
        assert (target == name).all()
    assert tower.forwards == [[0], *forwards]


def test_slices_of_calls_that_yield_wait_behind_others(tower: GatedTower, submit: Submit) -> None:
    jobs = Context()
    jobs.run(begin_call, True)
    found = [jobs.run(submit, 1, 4), jobs.run(submit, 2, 4), submit(3, 4), jobs.run(submit, 4, 2), submit(5, 4)]
    tower.open()
    for encoded, _ in found:
        encoded.result(TIMEOUT_S)
    assert tower.forwards == [[0], [3, 5], [1, 2, 4]]


def test_a_forward_has_the_adapter_of_the_first_slice_in_the_queue(
    tower: GatedTower, submit: Submit, batcher: Batcher
) -> None:
    slices = [(1, b"a", 4), (2, b"b", 4), (3, b"a", 4), (4, b"", 4), (5, b"a", 4), (6, b"a", 1), (7, b"", 4)]
    encoded = [submitted(batcher, name, tokens, adapter)[0] for name, adapter, tokens in slices]
    tower.open()
    for each in encoded:
        each.result(TIMEOUT_S)
    # 6 would have fitted beside 1 and 3, and does not overtake 5.
    assert tower.forwards == [[0], [1, 3], [2], [4, 7], [5, 6]]
    assert tower.adapters == [b"", b"a", b"b", b"", b"a"]


def test_sounds_and_frames_have_forwards_of_their_own_in_the_order_of_the_queue(
    tower: GatedTower, submit: Submit, batcher: Batcher
) -> None:
    encoded = []
    for name, is_sound, tokens in [(1, True, 4), (2, False, 4), (3, True, 4), (4, False, 4), (5, True, 4)]:
        values, target = torch.tensor([name, tokens]), torch.zeros(1, tokens, 2)
        encoded.append(batcher.submit(Sound(values) if is_sound else values, target))
    tower.open()
    for each in encoded:
        each.result(TIMEOUT_S)
    assert tower.forwards == [[0], [1, 3], [2, 4], [5]]


def test_a_batch_whose_slices_were_all_cancelled_at_the_last_moment_is_skipped(
    tower: GatedTower, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled, and not yet removed from the queue."""
    monkeypatch.setattr(Batcher, "_withdraw", lambda batcher, encoded: None)
    assert all(submit(name, 10)[0].cancel() for name in (1, 2))
    tower.open()
    submit(3, 10)[0].result(TIMEOUT_S)
    assert tower.forwards == [[0], [3]]


def test_the_queue_and_the_age_of_its_first_slice_are_reported(
    tower: GatedTower, submit: Submit, batcher: Batcher
) -> None:
    assert (batcher.queued, batcher.oldest_ns) == (0, None)  # a running slice is not queued
    first, _ = submit(1, 1)
    between_ns = time.monotonic_ns()
    second, _ = submit(2, 1)
    assert batcher.queued == 2
    assert (batcher.oldest_ns or 0) <= between_ns
    first.cancel()
    assert batcher.queued == 1
    assert (batcher.oldest_ns or 0) >= between_ns
    assert batcher.forward_began_ns is not None
    tower.open()
    second.result(TIMEOUT_S)
    assert (batcher.queued, batcher.oldest_ns) == (0, None)


def test_forwards_run_on_the_device_of_their_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device of a new thread is cuda:0."""
    current: list[Tensor] = []

    @contextmanager
    def device_of(tensor: Tensor) -> Iterator[None]:
        current.append(tensor)
        yield

    def encode(slices: Sequence[Tensor], adapter: bytes) -> list[Tensor]:
        assert current == [target]
        return [torch.ones(1, 2, 2)]

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    batcher, target = Batcher(encode, limit_of(10)), torch.zeros(1, 2, 2)
    batcher.start()
    batcher.submit(torch.tensor([0, 2]), target).result(TIMEOUT_S)
    batcher.close()


def test_an_idle_batcher_holds_no_target(tower: GatedTower, submit: Submit) -> None:
    encoded, target = submit(1, 3)
    tower.open()
    encoded.result(TIMEOUT_S)
    held = weakref.ref(target)
    del encoded, target
    deadline_s = time.monotonic() + TIMEOUT_S
    while held() is not None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


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
    found = {name: submit(name, tokens) for name, tokens in slices}
    tower.open()
    with pytest.raises(torch.OutOfMemoryError, match="none is left"):
        found.pop(TOO_LARGE)[0].result(TIMEOUT_S)
    for name, (encoded, target) in found.items():
        encoded.result(TIMEOUT_S)
        assert (target == name).all()
    assert tower.forwards == [[0], [1, 15, 16, 2], [1], [15], [16], [2], [3, 4]]  # 3 and 4 together again


def test_tensors_of_a_forward_that_ran_out_of_memory_are_freed_at_once(tower: GatedTower, submit: Submit) -> None:
    """Without the collector, before the slices run again, and although their error is kept."""
    gc.disable()
    try:
        submit(1, 3)
        large, _ = submit(TOO_LARGE, 3)
        tower.open(1)
        assert tower.begun()
        tower.open(1)
        assert tower.begun()
        assert [made() for made in tower.made] == [None]
        tower.open()
        assert isinstance(large.exception(TIMEOUT_S), torch.OutOfMemoryError)
        assert [made() for made in tower.made] == [None, None]
    finally:
        gc.enable()


# --- devices that compute beside the host: how its end fails what it holds is in test_sharing.py ------------------


class LateDevice:
    """Computes beside the host: forward n is computed once `done[n]` is set. error: of all of them."""

    def __init__(self) -> None:
        self.done = [threading.Event() for _ in range(4)]
        self.error: Exception | None = None
        self._numbers = count()

    def computed(self, device: torch.device) -> SimpleNamespace:
        """Stands in for `Computed`."""
        return SimpleNamespace(at_once=False, wait=partial(self._wait, next(self._numbers)))

    def _wait(self, number: int) -> None:
        assert self.done[number].wait(TIMEOUT_S)
        if self.error:
            raise self.error


@pytest.fixture
def late(tower: GatedTower, monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    device = LateDevice()
    tower.open()
    monkeypatch.setattr("gridsieve.services.encoder.items.batcher.Computed", device.computed)
    return device


def test_a_forward_that_the_queue_more_than_fills_is_launched_while_another_one_computes(
    tower: GatedTower, late: LateDevice, batcher: Batcher
) -> None:
    found = {1: submitted(batcher, 1, 4)}
    assert tower.begun()
    found |= {name: submitted(batcher, name, 4) for name in range(2, 7)}
    late.done[0].set()
    assert tower.begun()
    assert tower.begun()
    assert tower.forwards == [[1], [2, 3], [4, 5]], "both are launched, and 6 may get company"
    found[1][0].result(TIMEOUT_S)
    assert not found[2][0].done()
    for done in late.done:
        done.set()
    assert tower.begun()
    assert tower.forwards[3:] == [[6]]
    for name, (encoded, target) in found.items():
        encoded.result(TIMEOUT_S)
        assert (target == name).all()


def test_an_error_of_the_device_that_shows_late_fails_what_runs_and_ends_the_batcher(
    tower: GatedTower, late: LateDevice, batcher: Batcher
) -> None:
    encoded, _ = submitted(batcher, 1, 4)
    assert tower.begun()
    late.error = torch.AcceleratorError("the device is gone")
    late.done[0].set()
    with pytest.raises(Unavailable):
        encoded.result(TIMEOUT_S)
    assert not batcher.alive
