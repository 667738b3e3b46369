"""Readback copies on a stream of its own: after the work that it reads, without waiting for later work.

Without CUDA: a fake stream is a list of work, which runs when its event is waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from services.encoder.tower.transfers import Readback


class Stream:
    """Runs its work in order, as late as possible."""

    def __init__(self, *_: object) -> None:
        self.due: list[Callable[[], object]] = []
        self.done = 0

    def give(self, work: Callable[[], object]) -> Event:
        self.due.append(work)
        return Event(self)

    def wait_stream(self, other: Stream) -> None:
        self.give(Event(other).synchronize)

    def run(self, until: int) -> None:
        while self.done < until:
            self.done += 1
            self.due[self.done - 1]()


class Event:
    """The work of a stream so far."""

    def __init__(self, stream: Stream | None = None, blocking: bool = False) -> None:
        if stream is not None:
            self.record(stream)

    def record(self, stream: Stream) -> None:
        self.stream, self.until = stream, len(stream.due)

    def synchronize(self) -> None:
        self.stream.run(self.until)


class DeviceTensor:
    """NaN until its stream has computed its values."""

    device = torch.device("cuda")
    dtype = torch.float32

    def __init__(self, values: Tensor) -> None:
        self.shape, self.values = values.shape, torch.full_like(values, torch.nan)


@pytest.fixture
def tower_stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    current = [tower := Stream()]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    class HostTensor:
        def __init__(self, *_: object, pin_memory: bool, **__: object) -> None:
            assert pin_memory
            self.values: Tensor | None = None

        def copy_(self, source: DeviceTensor, non_blocking: bool) -> None:
            assert non_blocking

            def copy() -> None:
                self.values = source.values.clone()

            current[-1].give(copy)

    fakes = {"Stream": Stream, "Event": Event, "stream": on, "current_stream": lambda *_: current[-1]}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "empty", HostTensor)
    return tower


def test_readback_waits_for_earlier_work_and_not_for_later_work(tower_stream: Stream) -> None:
    wanted = [torch.arange(6.0), torch.ones(2)]
    found: list[Any] = [DeviceTensor(each) for each in wanted]
    for tensor, values in zip(found, wanted, strict=True):
        tower_stream.give(partial(tensor.values.copy_, values))
    reading = Readback(*found)
    assert tower_stream.done == 0  # the constructor does not wait
    tower_stream.give(lambda: pytest.fail("the host waited for the next forward"))
    read: list[Any] = reading.wait()
    assert all(torch.equal(each.values, values) for each, values in zip(read, wanted, strict=True))
    assert tower_stream.done == 2
    assert len(tower_stream.due) == 3  # the copies are on another stream


def test_on_the_cpu_nothing_is_copied() -> None:
    tensors = [torch.arange(6).view(2, 3), torch.ones(2)]
    assert all(one is other for one, other in zip(Readback(*tensors).wait(), tensors, strict=True))
