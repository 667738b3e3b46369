"""A failed CUDA graph capture restores the thread's stream and its permission to synchronise.

Runs without CUDA: streams and the device are fakes, `torch.cuda.graph` is torch's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
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

    @contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    card = Card()
    fakes = {
        "device": lambda _: nullcontext(),
        "Stream": lambda device: Mock(device=device),
        "stream": card.use,
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
    for _ in range(2):
        assert capture(card.compute).output is INPUTS
    assert card.computed == [(0, False), (FORBIDDEN, False), (0, True)] * 2
    assert (card.stream, card.mode) == (stream, 0)
    assert card.streams[0] is card.streams[1]
    assert card.streams[0].device == INPUTS.device


@pytest.mark.parametrize(
    ("fault", "computed", "error"),
    [
        ("waits", [(0, False), (FORBIDDEN, False)], "no graph can hold this"),
        ("fails", [(0, False), (FORBIDDEN, False), (0, True)], "previous error"),
    ],
)
def test_a_failed_capture_restores_the_stream(
    card: Card, capture: Capture, fault: str, computed: list[tuple[int, bool]], error: str
) -> None:
    stream = card.stream
    with pytest.raises(RuntimeError, match=error):
        capture(partial(card.compute, **{fault: True}))
    assert card.computed == computed
    assert (card.stream, card.mode) == (stream, 0)
