"""A capture of graphs that runs without CUDA, and fails where CUDA would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gridsieve.services.compute.graphs import Captured


class NoSynchronisation(TorchDispatchMode):
    """Fails at operators that make the host wait for a value from the device."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        name = function.name()
        assert not any(each in name for each in ("_local_scalar_dense", "nonzero", "masked_select")), name
        return function(*arguments, **named or {})


class Recorder:
    """A fake capture: its output is NaN until a replay, which recomputes it. It fails if the host would wait for the
    device."""

    def __init__(self) -> None:
        self.captured: list[int] = []
        self.outputs: list[Tensor] = []
        self.replayed: list[int] = []

    def __call__(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
        self.captured.append(len(inputs[0]))
        with NoSynchronisation():
            output = compute().fill_(torch.nan)
        self.outputs.append(output)

        def replay() -> None:
            self.replayed.append(len(inputs[0]))
            output.copy_(compute())

        return Captured(replay, output)
