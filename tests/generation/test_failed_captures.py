"""A failed CUDA graph capture restores the thread's stream and its permission to synchronise.

Runs without CUDA: streams and the device are fakes, `torch.cuda.graph` is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from services.encoder.tower.graphs import CudaDevice
from services.generation.model.graphs import CudaCapture

INPUTS = torch.zeros(3)
FORBIDDEN = 2  # torch's number of the mode in which synchronising raises

Capture: TypeAlias = Callable[[Callable[[], Tensor]], Any]


class Card:
    """A fake device whose captures cannot be ended after a failure in them.

    computed: mode and whether capturing, of each computation. streams: those of the captures.
    """

    def __init__(self) -> None:
        self.stream, self.mode = Mock(), 0
        self.capturing = self.broken = False
        self.computed: list[tuple[int, bool]] = []
        self.streams: list[Any] = []

    def set_mode(self, mode: int | str) -> None:
        self.mode = FORBIDDEN if mode == "error" else int(mode)

    def capture_begin(self, *_: Any, **__: Any) -> None:
        self.capturing = True
        self.streams.append(self.stream)

    def capture_end(self) -> None:
        self.capturing = False
        if self.broken:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None: ...

    def compute(self, *, waits: bool = False, fails: bool = False) -> Tensor:
        self.computed.append((self.mode, self.capturing))
        if (fails and self.capturing) or (waits and (self.capturing or self.mode == FORBIDDEN)):
            self.broken = self.capturing
            raise RuntimeError("no graph can hold this")
        return INPUTS


class On:
    """A fake `torch.cuda.stream`."""

    def __init__(self, card: Card, stream: Any) -> None:
        self._card, self._stream = card, stream

    def __enter__(self) -> None:
        self._before, self._card.stream = self._card.stream, self._stream

    def __exit__(self, *_: object) -> None:
        self._card.stream = self._before


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    fakes = {
        "device": lambda _: nullcontext(),
        "Stream": lambda device: Mock(device=device),
        "stream": partial(On, card),
        "current_stream": lambda _=None: card.stream,
        "graph_pool_handle": Mock,
        "CUDAGraph": lambda: card,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "get_sync_debug_mode": lambda: card.mode,
        "set_sync_debug_mode": card.set_mode,
    }
    for name, value in fakes.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda.graph, "default_capture_stream", Mock())
    monkeypatch.setattr(torch._C, "_host_emptyCache", lambda: None, raising=False)
    return card


@pytest.fixture(params=["tower", "decode steps"])
def capture(card: Card, request: pytest.FixtureRequest) -> Capture:
    if request.param == "tower":
        return partial(CudaDevice(INPUTS.device).capture, [INPUTS])
    return partial(CudaCapture(INPUTS.device), INPUTS)


def test_captures_run_on_one_stream_of_their_device_after_a_run_that_may_not_synchronise(
    card: Card, capture: Capture
) -> None:
    stream = card.stream
    assert capture(card.compute).output is INPUTS
    assert card.computed == [(0, False), (FORBIDDEN, False), (0, True)]
    assert (card.stream, card.mode) == (stream, 0)
    capture(card.compute)
    assert len({id(stream) for stream in card.streams}) == 1
    assert card.streams[0].device == INPUTS.device


def test_a_computation_that_synchronises_fails_before_it_is_captured(card: Card, capture: Capture) -> None:
    stream = card.stream
    with pytest.raises(RuntimeError, match="no graph can hold this"):
        capture(partial(card.compute, waits=True))
    assert card.computed == [(0, False), (FORBIDDEN, False)]
    assert (card.stream, card.mode) == (stream, 0)


def test_a_capture_that_cannot_be_ended_restores_the_stream_and_keeps_the_cause(card: Card, capture: Capture) -> None:
    stream = card.stream
    with pytest.raises(RuntimeError, match="previous error") as error:
        capture(partial(card.compute, fails=True))
    assert str(error.value.__context__) == "no graph can hold this"
    assert (card.stream, card.mode) == (stream, 0)
