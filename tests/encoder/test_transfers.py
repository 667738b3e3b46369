"""What leaves the device leaves beside the tower's stream: after what was computed, and before what comes next.

No CUDA here: streams are lists of what they have yet to do, which they do when somebody waits for them.
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
    """As of torch.cuda: in order, and later than the host says."""

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
    """A stream's work so far."""

    def __init__(self, stream: Stream | None = None, blocking: bool = False) -> None:
        if stream is not None:
            self.record(stream)

    def record(self, stream: Stream) -> None:
        self.stream, self.until = stream, len(stream.due)

    def synchronize(self) -> None:
        self.stream.run(self.until)


class DeviceTensor:
    """Values that are there once its stream has computed them."""

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


def test_what_was_computed_is_read_and_nobody_waits_for_what_comes_next(tower_stream: Stream) -> None:
    wanted = [torch.arange(6.0), torch.ones(2)]
    found: list[Any] = [DeviceTensor(each) for each in wanted]
    for tensor, values in zip(found, wanted, strict=True):
        tower_stream.give(partial(tensor.values.copy_, values))
    reading = Readback(*found)
    assert tower_stream.done == 0  # the host went on at once
    tower_stream.give(lambda: pytest.fail("the next forward was waited for"))
    read: list[Any] = reading.wait()
    assert all(torch.equal(each.values, values) for each, values in zip(read, wanted, strict=True))
    assert tower_stream.done == 2
    assert len(tower_stream.due) == 3  # no copy stands in the next forward's way
