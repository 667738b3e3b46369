"""What a step reads of prompts in place of sampling tokens: for each a row of values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gridsieve.services.compute.transfers import ToHost
from gridsieve.services.generation.sampling.sampler import SampledToken

Float32Array: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ReadRow(SampledToken):
    """values: float32 [W], in place of a token, whose id has no meaning."""

    values: Float32Array = field(default_factory=lambda: np.empty(0, np.float32))


class ReadRows:
    """The rows of a step, float32 [B, W], which the device may still be computing."""

    def __init__(self, rows: Tensor) -> None:
        self._rows = ToHost([rows])

    def read(self) -> list[ReadRow]:
        """Waits for the device."""
        (rows,) = self._rows.wait()
        return [ReadRow(0, values=row.copy()) for row in rows.numpy()]
