"""Steps of recurrent states within their slots, and the kernels that compute them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class SlotSteps:
    """Tokens of R sequences that advance their states within the slots.

    matrices: float32 [slots, heads, rows, columns]. slots: int64 [R] each, those to read from and those to write.
    rows: the channels of the tokens [R, L, ..], their gates [R, L, heads] each (of a scan also rates and skip,
    float32 [heads]), and the output. tokens: the first token that is taken, the first after these, and L.
    """

    matrices: Tensor
    slots: Sequence[Tensor]
    rows: Sequence[Tensor]
    tokens: tuple[int, int, int]


class SlotKernels(Protocol):
    """Kernels that write the output and the states of steps; `state_kernels.TritonStates` has them."""

    def delta(self, steps: SlotSteps, key_heads: int) -> None:
        """Of a gated delta network whose queries and keys have so many heads."""

    def scan(self, steps: SlotSteps, groups: int) -> None:
        """Of a Mamba2 scan whose B and C have so many groups."""
