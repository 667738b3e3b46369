"""Experts of a mixture as modules of their own, so that their layers can stay quantised.

The rows are put in the order of their experts. Each expert computes its own rows: its weights, and no other's, are
dequantised meanwhile, as its layers do it. The host must know how many rows an expert has, so on CUDA it waits in each
layer, and no graph can hold these experts. Of several ranks each has some of the experts, whole, and computes their
rows; what has the other rows is added by transformers' all-reduce around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gridsieve.services.generation.model.experts import by_expert


class SeparateExperts(nn.ModuleDict):
    """Takes the place of the experts of transformers, without biases. Its modules have their numbers as names.

    The layers of each are gate_proj and up_proj, or up_proj alone, or gate_up_proj; and down_proj.
    count: of all experts. own: the numbers of this rank's experts. fixed: see `experts.by_expert`.
    """

    def __init__(self, stacked: Any, joined: bool, rank: int = 0, ranks: int = 1) -> None:
        """stacked: transformers' experts. joined: gate and up are one layer. The layers are on the meta device."""
        count, hidden, width = stacked.down_proj.shape
        own = range(count * rank // ranks, count * (rank + 1) // ranks)
        if not stacked.has_gate:
            inner, multiply = {"up_proj": width}, stacked.act_fn
        else:
            inner = {"gate_up_proj": 2 * width} if joined else {"gate_proj": width, "up_proj": width}
            multiply = stacked._apply_gate
        super().__init__({str(number): _Expert(hidden, inner, width, multiply) for number in own})
        self.count, self.own, self.fixed = count, own, False

    def forward(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """rows: [T, D]. experts: int64 [T, k], the experts of each row; weights: [T, k], theirs. Returns [T, D], of
        other ranks' experts zeros."""
        modules = dict(zip(self.own, self.values(), strict=True))
        return by_expert(modules, rows, experts, weights, self.count, self.fixed)


class _Expert(nn.Module):
    def __init__(self, hidden: int, inner: Mapping[str, int], width: int, multiply: Callable[[Tensor], Tensor]) -> None:
        """inner: outputs of the layers before down_proj, by name. multiply: makes of these, side by side, its inputs,
        [.., width]."""
        super().__init__()
        for name, outputs in inner.items():
            self.add_module(name, nn.Linear(hidden, outputs, bias=False, device="meta"))
        self.down_proj = nn.Linear(width, hidden, bias=False, device="meta")
        self._inner, self._multiply = tuple(inner), multiply

    def forward(self, rows: Tensor) -> Tensor:
        """[n, D] to the same shape."""
        products = [getattr(self, name)(rows) for name in self._inner]
        computed: Tensor = self.down_proj(self._multiply(torch.cat(products, -1)))
        return computed


def has_separate_experts(text: nn.Module) -> bool:
    return any(isinstance(each, SeparateExperts) for each in text.modules())
