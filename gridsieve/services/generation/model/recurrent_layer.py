"""A layer with recurrent states as the text model calls it: for the whole packed batch, whose sequences may be at any
place. And the choice of its kernels.

Compiled forwards cannot pass the slots on. An operator of its own, which is opaque to the compiler, finds them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import structlog
import torch
from torch import Tensor, nn

from gridsieve.services.generation.model.attention.running import RUNNING
from gridsieve.services.generation.model.states import Convolution, StateBatch

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Kernels:
    """transformers' functions: for chunks of several sequences, for one token after the other of each.

    On a card with a package that has kernels, they are these, else torch's operators.
    """

    chunk: Callable[..., tuple[Tensor, Tensor]]
    step: Callable[..., Any]

    def by_torch(self) -> Kernels:
        return Kernels(inspect.unwrap(self.chunk), inspect.unwrap(self.step))


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedKernels:
    """Of a `Recurrence` with the kernels of `package`, which are used once they have passed `check`."""

    package: ClassVar[str]
    installed: ClassVar[Kernels]
    kernels: Kernels

    @torch.inference_mode()
    def fastest(self, like: Tensor) -> Self:
        """See `Recurrence`. Cards have run only torch's own kernels here."""
        if like.device.type != "cuda":
            return self
        draw = torch.Generator(like.device).manual_seed(0)
        found = replace(self, kernels=self.installed)
        try:
            found.check(self, like, lambda *shape: torch.rand(shape, generator=draw, device=like.device).mul(2).sub(1))
        except Exception as error:  # a kernel that is compiled for the card may fail in any way
            log.warning(f"recurrent states are computed by torch: {self.package} does not work", error=str(error))
            return self
        return found

    def check(self, exact: Self, like: Tensor, drawn: Callable[..., Tensor]) -> None:
        """Compares the kernels with those of `exact`, on two sequences. drawn: values in [-1, 1) of a shape.

        Raises AssertionError, and whatever the kernels raise.
        """
        raise NotImplementedError


class RecurrentLayer(nn.Module):
    """layer_idx: its number among the layers with states."""

    layer_idx: int
    conv1d: nn.Conv1d

    def advance(
        self,
        states: StateBatch | None,
        inputs: Tensor,
        gates: Sequence[Tensor],
        weights: Sequence[Tensor],
        head_dim: int,
    ) -> Tensor:
        """states: None in a compiled forward, which has them from `running`.

        inputs: [1, T, channels]. gates: [1, T, heads] each. weights, head_dim: see `StateBatch.advance`.
        Returns [1, T, heads, head_dim].
        """
        taps, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
        if states is None:
            found: Tensor = torch.ops.gridsieve.advance_states(
                inputs, taps, bias, list(gates), list(weights), self.layer_idx, head_dim
            )
            return found
        rows = [gate[0] for gate in gates]
        return states.advance(self.layer_idx, inputs[0], Convolution(taps, bias), rows, weights, head_dim)[None]


def _advance(
    inputs: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    gates: list[Tensor],
    weights: list[Tensor],
    layer: int,
    head_dim: int,
) -> Tensor:
    assert RUNNING.states is not None
    rows = [gate[0] for gate in gates]
    return RUNNING.states.advance(layer, inputs[0], Convolution(taps, bias), rows, weights, head_dim)[None]


_library = torch.library.Library("gridsieve", "FRAGMENT")
_library.define(
    "advance_states(Tensor inputs, Tensor taps, Tensor? bias, Tensor[] gates, Tensor[] weights, int layer, "
    "int head_dim) -> Tensor"
)
_library.impl("advance_states", _advance, "CPU")
_library.impl(
    "advance_states",
    lambda inputs, taps, bias, gates, weights, layer, head_dim: inputs.new_empty((*gates[0].shape, head_dim)),
    "Meta",
)
