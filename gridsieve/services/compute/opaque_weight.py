"""Weights in layouts that torch's compiler does not know. Compiled code names them by number, and one operator, which
is opaque to the compiler, multiplies by them."""

from __future__ import annotations

from itertools import count
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

_numbers = count()


class Weight(Protocol):
    """A matrix [out_features, in_features] with its bias, in a layout of its own."""

    def multiply(self, rows: Tensor) -> Tensor:
        """[.., in_features] to [.., out_features]."""

    def register(self, module: nn.Module) -> None:
        """Gives `module` the buffer `number`, for `multiply`."""


class OpaqueWeight:
    """A `Weight` that compiled code can use, on the CPU."""

    def __init__(self) -> None:
        self._number = next(_numbers)
        _weights[self._number] = self

    def multiply(self, rows: Tensor) -> Tensor:
        raise NotImplementedError

    def register(self, module: nn.Module) -> None:
        """As a tensor: the compiler makes other code for each value of a number, but one code for all layers
        otherwise."""
        module.register_buffer("number", torch.tensor(self._number), persistent=False)


_weights: WeakValueDictionary[int, OpaqueWeight] = WeakValueDictionary()


def multiply(rows: Tensor, weight: Weight, number: Tensor, out_features: int) -> Tensor:
    """number: of the module that `weight` was registered with."""
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.gridsieve.packed_linear(rows, number, out_features)
        return product
    return weight.multiply(rows)


_library = torch.library.Library("gridsieve", "FRAGMENT")
_library.define("packed_linear(Tensor rows, Tensor number, int out_features) -> Tensor")
_library.impl("packed_linear", lambda rows, number, out_features: _weights[int(number)].multiply(rows), "CPU")
_library.impl(
    "packed_linear", lambda rows, number, out_features: rows.new_empty((*rows.shape[:-1], out_features)), "Meta"
)
