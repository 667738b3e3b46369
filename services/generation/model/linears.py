"""Linear layers whose weights are laid out for the processor once, where torch would do so in every call.

It owns that layout and knows no model. The layout is oneDNN's, by the operators that torch's own compiler freezes
linear layers with.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# The layout that oneDNN chooses for this many rows was the best of those tried from one row to two thousand.
PACKED_FOR_ROWS = 64


class PackedLinear(nn.Module):
    """Computes what a linear layer does: [.., in_features] to [.., out_features]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_FOR_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: Tensor) -> Tensor:
        computed: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return computed


def packed(linear: nn.Linear) -> nn.Module:
    """The layer with its weight laid out anew, or itself where it is quantised, or oneDNN lacks its element type."""
    return PackedLinear(linear) if _is_plain(linear) and _can_pack(linear.weight) else linear


def pack_linears(model: nn.Module) -> None:
    """Puts `packed` layers in place of all linear ones in `model`, one after the other, so that no more is held."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, packed(child))


def _is_plain(linear: nn.Linear) -> bool:
    """Quantizers leave a layer its class and give it another weight, or none, or another way to compute."""
    return "forward" not in vars(linear) and type(linear._parameters.get("weight")) in (Tensor, nn.Parameter)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
