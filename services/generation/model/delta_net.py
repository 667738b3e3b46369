"""Gated delta networks over the slots of recurrent states, for the whole packed batch: transformers' layer, whose
sequences may be at any place.

Source: `Qwen3_5GatedDeltaNet` of transformers, whose weights and names it keeps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from framesieve.services.generation.model.attention.running import RUNNING
from framesieve.services.generation.model.states import StateBatch, StateSizes


class GatedDeltaNet(nn.Module):
    """The class that such a layer of transformers takes on. layer_idx: its number among those with states."""

    layer_idx: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_dim: int
    conv_kernel_size: int
    conv1d: nn.Conv1d
    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module
    norm: nn.Module
    out_proj: nn.Module
    A_log: nn.Parameter
    dt_bias: nn.Parameter

    def forward(self, hidden_states: Tensor, states: StateBatch | None = None, **_: object) -> Tensor:
        """hidden_states: [1, T, D], the packed rows. Returns the same shape."""
        inputs, z = self.in_proj_qkv(hidden_states), self.in_proj_z(hidden_states)
        beta = self.in_proj_b(hidden_states).sigmoid()
        decay = -self.A_log.float().exp() * F.softplus(self.in_proj_a(hidden_states).float() + self.dt_bias)
        taps = self.conv1d.weight.squeeze(1)
        if states is None:
            out = torch.ops.framesieve.gated_delta_rule(inputs, beta, decay, taps, self.layer_idx, self.head_v_dim)
        else:
            out = states.advance(self.layer_idx, inputs[0], beta[0], decay[0], taps)[None]
        normed = self.norm(out.flatten(0, 2), z.reshape(-1, self.head_v_dim))
        rows: Tensor = self.out_proj(normed.view(z.shape))
        return rows


def number_layers(text: Any) -> StateSizes | None:
    """Numbers the layers of a text model by kind, from 0 each, and returns the sizes of its states, if it has any.

    The caches know nothing of layers of the other kind.
    """
    attention = [layer.self_attn for layer in text.layers if hasattr(layer, "self_attn")]
    recurrent = [layer.linear_attn for layer in text.layers if hasattr(layer, "linear_attn")]
    for layers in (attention, recurrent):
        for number, layer in enumerate(layers):
            layer.layer_idx = number
    for layer in recurrent:
        layer.__class__ = GatedDeltaNet
    if not recurrent:
        return None
    one = recurrent[0]
    return StateSizes(
        layers=len(recurrent),
        channels=one.conv_dim,
        kernel=one.conv_kernel_size,
        key_heads=one.num_k_heads,
        value_heads=one.num_v_heads,
        key_dim=one.head_k_dim,
        value_dim=one.head_v_dim,
    )


def _advance(inputs: Tensor, beta: Tensor, decay: Tensor, taps: Tensor, layer: int, _: int) -> Tensor:
    assert RUNNING.states is not None
    return RUNNING.states.advance(layer, inputs[0], beta[0], decay[0], taps)[None]


# An operator of its own is opaque to the compiler.
_library = torch.library.Library("framesieve", "FRAGMENT")
_library.define(
    "gated_delta_rule(Tensor inputs, Tensor beta, Tensor decay, Tensor taps, int layer, int value_dim) -> Tensor"
)
_library.impl("gated_delta_rule", _advance, "CPU")
_library.impl(
    "gated_delta_rule",
    lambda inputs, beta, decay, taps, layer, value_dim: inputs.new_empty((*beta.shape, value_dim)),
    "Meta",
)
