"""A tower's forward with LoRA adapters: a second tree of its modules, in which adapted layers add B(A(x)).

    tower:    model ─ blocks ─ 0 ─ attn ─ qkv            weights, norms and all else are held once
    adapted:  model'─ blocks'─ 0'─ attn'─ qkv + B A      B, A: views of the buffer of `Matrices`

Both trees can be compiled, and captured in graphs. One tree is for all adapters: before a forward, the matrices of its
adapter are copied to the buffer. So adapters cost a forward without one nothing.
Source: LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gridsieve.services.compute.adapters import Features, LowRank
from gridsieve.services.encoder.tower.packing import PackedLayout, Side
from gridsieve.services.encoder.tower.saturation import saturated

# Each matrix begins at a multiple of so many numbers, as compiled code expects of what it reads.
_ALIGNED = 64


class Matrices:
    """The matrices that adapters add to the layers of a tower, and those of one of them where the layers read them.

    buffer    [ A B · A B · … ]     of every layer that any of the adapters changes, with the highest of their ranks
    adapter   [ A B · A B · … ]     the same, with zeros for what it lacks, which add zeros
    """

    def __init__(self, adapters: Mapping[bytes, Mapping[str, LowRank]], layers: Mapping[str, nn.Module]) -> None:
        """adapters: at least one, by digest, each with its additions by layer. layers: of the tower, by name; additions
        of others are left out."""
        of_all = [{name: each for name, each in own.items() if name in layers} for own in adapters.values()]
        self._rank = max((len(each.down) for own in of_all for each in own.values()), default=0)
        self._layers = {name: layers[name] for name in sorted({name for own in of_all for name in own})}
        like = next(each.down for own in adapters.values() for each in own.values())
        self._buffer = like.new_zeros(sum(sum(self._sizes(each)) for each in self._layers.values()))
        self._of = {digest: self._laid_out(own) for digest, own in zip(adapters, of_all, strict=True)}
        self._current = b""

    @property
    def added(self) -> dict[str, LowRank]:
        """What the layers add after each `put`, by name."""
        return self._views(self._buffer)

    def put(self, digest: bytes) -> None:
        """Makes the layers add what this adapter adds, in forwards that are launched from now on."""
        if digest != self._current:
            self._buffer.copy_(self._of[digest])
            self._current = digest

    def _laid_out(self, additions: Mapping[str, LowRank]) -> Tensor:
        values = torch.zeros_like(self._buffer)
        views = self._views(values)
        for name, each in additions.items():
            for place, matrix in ((views[name].down, each.down), (views[name].up, each.up)):
                place[: len(matrix), : matrix.shape[1]] = matrix
        return values

    def _views(self, values: Tensor) -> dict[str, LowRank]:
        found, rank = {}, self._rank
        parts = iter(values.split([size for each in self._layers.values() for size in self._sizes(each)]))
        for name, layer in self._layers.items():
            inputs, outputs = _features(layer)
            down, up = next(parts)[: rank * inputs], next(parts)[: outputs * rank]
            found[name] = LowRank(down.view(rank, inputs), up.view(outputs, rank))
        return found

    def _sizes(self, layer: nn.Module) -> tuple[int, int]:
        """Of both matrices, in numbers."""
        inputs, outputs = (-(-self._rank * each // _ALIGNED) * _ALIGNED for each in _features(layer))
        return inputs, outputs


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedForward:
    """See `Tower.forward`; with an adapter. forward: of all adapters of the tower, which reads `matrices`."""

    forward: Callable[[Tensor, Sequence[Side]], Tensor]
    matrices: Matrices
    digest: bytes

    def __call__(self, patches: Tensor, sides: Sequence[Side]) -> Tensor:
        self.matrices.put(self.digest)
        return self.forward(patches, sides)


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

    def matrices(self, adapters: Mapping[bytes, Mapping[str, LowRank]]) -> Matrices:
        """Of at least one adapter: by digest, its additions by names of layers."""
        named = {
            digest: {name.removeprefix(self.prefix): each for name, each in additions.items()}
            for digest, additions in adapters.items()
        }
        return Matrices(named, dict(self.model.named_modules()))

    def with_added(
        self, added: Mapping[str, LowRank], layers: Sequence[nn.Module]
    ) -> tuple[Callable[[Tensor, PackedLayout[Tensor]], Tensor], tuple[nn.Module, ...]]:
        """The forward with additions, by names in `model`; and what takes the place of some of its modules there."""
        model, compute = _twin(self.model, added), self.compute
        names = {each: name for name, each in self.model.named_modules()}

        def compute_adapted(patches: Tensor, layout: PackedLayout[Tensor]) -> Tensor:
            return compute(model, patches, layout)

        return compute_adapted, tuple(model.get_submodule(names[each]) for each in layers)


def linear_layers(model: nn.Module, prefix: str = "") -> dict[str, Features]:
    """The sizes of its linear layers, by name, before any is replaced or widened."""
    return {
        prefix + name: Features(each.in_features, each.out_features)
        for name, each in model.named_modules()
        if isinstance(each, nn.Linear)
    }


def _features(layer: Any) -> Features:
    """As it is now, which may be wider than what adapters were trained on."""
    return Features(layer.in_features, layer.out_features)


def _twin(module: nn.Module, added: Mapping[str, LowRank], name: str = "") -> nn.Module:
    """A module that shares everything with `module` but the layers that add something, and what contains them."""
    if name in added:
        return _AdaptedLinear(module, added[name])
    before = f"{name}." if name else ""
    children = {own: _twin(each, added, before + own) for own, each in module.named_children()}
    if all(children[own] is each for own, each in module.named_children()):
        return module
    twin = copy.copy(module)
    twin._modules = {**module._modules, **children}
    return twin


class _AdaptedLinear(nn.Module):
    """A linear layer with an addition: [.., in_features] to [.., out_features]."""

    down: Tensor
    up: Tensor

    def __init__(self, layer: Any, added: LowRank) -> None:
        super().__init__()
        self.layer = layer
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("down", added.down, persistent=False)
        self.register_buffer("up", added.up, persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        computed: Tensor = self.layer(rows)
        return saturated(computed + F.linear(saturated(F.linear(rows, self.down)), self.up))
