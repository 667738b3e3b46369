"""What graphs of a tower are captured by where there is no CUDA, and a tower that they can hold.

What is captured is computed again at every replay, over buffers in which nothing old can be used, and attention
follows its formula.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from common.checkpoint import Checkpoint
from services.encoder.families import load_tower, vision_model
from services.encoder.tower.graphs import Captured
from services.encoder.tower.tower import Tower
from tests.encoder.varlen_formula import attend_by_formula
from tests.generation.test_decode_graphs import NoWaiting

CPU = torch.device("cpu")
STALE_BYTE, FAR_AWAY = 255, 2**30


class Recorder:
    """In place of CUDA: capturing computes nothing that lasts, and replaying computes again what was captured.

    Before each replay all that it reads must have been written since the last one. eager_s: what a forward without a
    graph is measured to take, where a replay takes 1 s.
    """

    def __init__(self, eager_s: float = 1.0) -> None:
        self._eager_s = eager_s
        self.captured: list[int] = []
        self.replayed: list[int] = []

    def capture(self, inputs: Sequence[Tensor], compute: Callable[[], Tensor]) -> Captured:
        self.captured.append(len(inputs[0]))
        with NoWaiting(), patch.object(Tensor, "tolist", side_effect=AssertionError("the host would wait")):
            output = compute().fill_(torch.nan)

        def replay() -> None:
            assert not any((each == stale(each)).any() or each.isnan().any() for each in inputs)
            self.replayed.append(len(inputs[0]))
            output.copy_(compute())
            for each in inputs:
                each.fill_(stale(each))

        for each in inputs:
            each.fill_(stale(each))
        return Captured(replay, output)

    def measure_s(self, run: Callable[[], object]) -> float:
        replays = len(self.replayed)
        run()
        return 1.0 if len(self.replayed) > replays else self._eager_s


def stale(buffer: Tensor) -> float:
    if buffer.is_floating_point():
        return torch.nan
    return STALE_BYTE if buffer.dtype == torch.uint8 else FAR_AWAY


def load_packed(checkpoint: Path) -> Tower:
    """A tower whose attention is called once a layer, as on CUDA."""
    with patch.object(vision_model, "find_attention", return_value=attend_by_formula):
        return load_tower(Checkpoint(checkpoint), "float32", CPU)
