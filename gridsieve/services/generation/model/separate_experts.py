"""Experts of a mixture as modules of their own, so that their layers can stay quantised.

The rows are put in the order of their experts. Each expert computes its own rows: its weights, and no other's, are
dequantised meanwhile, as its layers do it. The host must know how many rows an expert has, so on CUDA it waits in each
layer, and no graph can hold these experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class SeparateExperts(nn.ModuleList):
    """Takes the place of the experts of transformers, without biases.

    The layers of each are gate_proj and up_proj, or up_proj alone, or gate_up_proj; and down_proj.
    """

    def __init__(self, stacked: Any, joined: bool) -> None:
        """stacked: transformers' experts. joined: gate and up are one layer. The layers are on the meta device."""
        width, hidden = stacked.down_proj.shape[2], stacked.down_proj.shape[1]
        if not stacked.has_gate:
            outputs, multiply = {"up_proj": width}, stacked.act_fn
        else:
            outputs = {"gate_up_proj": 2 * width} if joined else {"gate_proj": width, "up_proj": width}
            multiply = stacked._apply_gate
        sizes = {name: (hidden, each) for name, each in outputs.items()} | {"down_proj": (width, hidden)}
        super().__init__(_Expert(sizes, multiply) for _ in stacked.down_proj)

    def forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """rows: [T, D]. experts: int64 [T, k], the experts of each row; weights: [T, k], theirs. Returns [T, D]."""
        order = experts.flatten().argsort(stable=True)
        counts = torch.bincount(experts.flatten(), minlength=len(self)).tolist()
        parts = rows[order // experts.shape[1]].split(counts)
        computed = torch.cat([expert(part) for expert, part in zip(self, parts, strict=True) if len(part)])
        outputs = torch.empty_like(computed).index_copy_(0, order, computed).view(*experts.shape, -1)
        return (outputs * weights[..., None]).sum(1).to(rows.dtype)


class _Expert(nn.Module):
    def __init__(self, sizes: Mapping[str, tuple[int, int]], multiply: Callable[[Tensor], Tensor]) -> None:
        """sizes: inputs and outputs of each layer, of the last one those of down_proj. multiply: what the product of
        the others becomes."""
        super().__init__()
        for name, (inputs, outputs) in sizes.items():
            self.add_module(name, nn.Linear(inputs, outputs, bias=False, device="meta"))
        self._multiply = multiply

    def forward(self, rows: Tensor) -> Tensor:
        """[n, D] to the same shape."""
        *inner, down = self.children()
        computed: Tensor = down(self._multiply(torch.cat([each(rows) for each in inner], -1)))
        return computed


def has_separate_experts(text: nn.Module) -> bool:
    return any(isinstance(each, SeparateExperts) for each in text.modules())
