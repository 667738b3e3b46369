"""A tower's forward with a LoRA adapter: a second tree of its modules, in which adapted layers add B(A(x)).

    tower:    model ─ blocks ─ 0 ─ attn ─ qkv            compiled, and captured in graphs
    adapted:  model'─ blocks'─ 0'─ attn'─ qkv + B A      neither; weights, norms and all else are the tower's

So adapters cost a forward without one nothing, and take no memory beside their own matrices.
Source: LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from gridsieve.services.compute.adapters import Features, LowRank
from gridsieve.services.encoder.tower.packing import PackedLayout


@dataclass(frozen=True, slots=True, eq=False)
class Adaptable:
    """The linear layers of a tower and its projector that adapters may change.

    model: has them; compute: a forward of it, otherwise as `ModelForward.compute`. layers: by their names in
    transformers' whole model, without its own prefix; some of them may not be in `model`, because they are not
    computed. prefix: of these names, which those in `model` lack.
    """

    model: nn.Module
    compute: Callable[[Any, Tensor, PackedLayout[Tensor]], Tensor]
    layers: Mapping[str, Features]
    prefix: str = ""

    def with_additions(self, additions: Mapping[str, LowRank]) -> Callable[[Tensor, PackedLayout[Tensor]], Tensor]:
        """The forward with additions, by names of layers."""
        own = {name.removeprefix(self.prefix): addition for name, addition in additions.items()}
        model, compute = _twin(self.model, own), self.compute

        def compute_adapted(patches: Tensor, layout: PackedLayout[Tensor]) -> Tensor:
            return compute(model, patches, layout)

        return compute_adapted


def linear_layers(model: nn.Module, prefix: str = "") -> dict[str, Features]:
    """The sizes of its linear layers, by name, before any is replaced or widened."""
    return {
        prefix + name: Features(each.in_features, each.out_features)
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear)
    }


def _twin(module: nn.Module, additions: Mapping[str, LowRank], name: str = "") -> nn.Module:
    """A module that shares everything with `module` but the layers that add something, and what contains them."""
    if name in additions:
        return _AdaptedLinear(module, additions[name])
    before = f"{name}." if name else ""
    children = {own: _twin(each, additions, before + own) for own, each in module.named_children()}
    if all(children[own] is each for own, each in module.named_children()):
        return module
    twin = copy.copy(module)
    twin._modules = {**module._modules, **children}
    return twin


class _AdaptedLinear(nn.Module):
    """A linear layer with an addition: [.., in_features] to [.., out_features]."""

    def __init__(self, layer: Any, addition: LowRank) -> None:
        super().__init__()
        self.layer = layer
        self.in_features, self.out_features = layer.in_features, layer.out_features
        # Zeros for features by which the layer was widened.
        down = F.pad(addition.down, (0, self.in_features - addition.down.shape[1]))
        up = F.pad(addition.up, (0, 0, 0, self.out_features - addition.up.shape[0]))
        self._addition = LowRank(down, up)

    def forward(self, rows: Tensor) -> Tensor:
        computed: Tensor = self.layer(rows)
        return computed + self._addition.of(rows)
