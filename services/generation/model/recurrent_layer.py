"""A layer with recurrent states as the text model calls it: for the whole packed batch, whose sequences may be at any
place.

Compiled forwards cannot pass the slots on. An operator of its own, which is opaque to the compiler, finds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from framesieve.services.generation.model.attention.running import RUNNING
from framesieve.services.generation.model.states import Convolution, StateBatch


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
            found: Tensor = torch.ops.framesieve.advance_states(
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


_library = torch.library.Library("framesieve", "FRAGMENT")
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
