"""Linear layers whose weights are reordered once for the CPU, which torch would do in every call; and linear layers of
the same rows, joined to one product, on the CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Where layers are joined though their weights are not reordered.
JOINING_DEVICES = ("cuda",)
# oneDNN chooses the layout of a packed weight for this number of rows. Of the numbers tried, which ranged from one row
# to two thousand, its layout was the fastest.
PACKED_FOR_ROWS = 64

_numbers = count()


class _PackedWeight:
    """A weight in oneDNN's layout, which torch's compiler does not know, and its number, which it passes on."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR_ROWS)
        self.bias = None if bias is None else bias.detach().clone()
        self.number = next(_numbers)
        _packed[self.number] = self

    def multiply(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return product

    def register(self, module: nn.Module) -> None:
        """Gives `module` the number, for `_multiply`.

        As a tensor: the compiler makes other code for each value of a number, but one code for all layers otherwise.
        """
        module.register_buffer("number", torch.tensor(self.number), persistent=False)


class _PlainWeight:
    """A weight as it is. It is never compiled."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()

    def multiply(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight, self.bias)

    def register(self, module: nn.Module) -> None:
        module.register_buffer("number", None)


_packed: WeakValueDictionary[int, _PackedWeight] = WeakValueDictionary()


class PackedLinear(nn.Module):
    """Computes a linear layer by the oneDNN operators that torch's compiler uses for frozen ones.

    [.., in_features] to [.., out_features].
    """

    number: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._packed = _PackedWeight(linear.weight, linear.bias)
        self._packed.register(self)

    def forward(self, rows: Tensor) -> Tensor:
        return _multiply(rows, self._packed, self.number, self.out_features)


class JoinedLinear(nn.Module):
    """One of several layers that are called with the same rows, one after another, and computed by the first of them.

    A product of one row takes as long as reading its weights, and small ones take longer to begin than to read. Layers
    that are quantised are left as they are.
    """

    number: Tensor

    def __init__(self, linear: nn.Linear, product: _Product, begin: int, last: bool) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._product, self._columns, self._last = product, slice(begin, begin + linear.out_features), last
        product.weight.register(self)

    def forward(self, rows: Tensor) -> Tensor:
        return self._product.of(rows, self.number, self._last)[..., self._columns]


class _Product:
    """The product of joined layers, from the first one's call to the last one's."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        biases = [each.bias for each in linears]
        kind = _PackedWeight if _can_pack(linears[0].weight) else _PlainWeight
        self.weight: _PackedWeight | _PlainWeight = kind(torch.cat([each.weight for each in linears]), _joined(biases))
        self._out_features = sum(each.out_features for each in linears)
        self._computed: tuple[Tensor, Tensor] | None = None

    def of(self, rows: Tensor, number: Tensor, last: bool) -> Tensor:
        if self._computed is None or self._computed[0] is not rows:
            self._computed = rows, _multiply(rows, self.weight, number, self._out_features)
        product = self._computed[1]
        if last:
            self._computed = None
        return product


def as_one(first: Tensor, second: Tensor) -> Tensor | None:
    """The product of which the results of two joined layers are views, with what was added to them since.

    [.., I] each, to [.., 2 · I]; None if they are products of their own.
    """
    apart = second.storage_offset() - first.storage_offset()
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr() or apart != first.shape[-1]:
        return None
    return first.as_strided((*first.shape[:-1], apart + second.shape[-1]), first.stride())


def _multiply(rows: Tensor, weight: _PackedWeight | _PlainWeight, number: Tensor, out_features: int) -> Tensor:
    if torch.compiler.is_compiling():
        product: Tensor = torch.ops.framesieve.packed_linear(rows, number, out_features)
        return product
    return weight.multiply(rows)


def _joined(biases: Sequence[Tensor | None]) -> Tensor | None:
    found = [bias for bias in biases if bias is not None]
    return torch.cat(found) if found else None


def join_linears(model: nn.Module, *groups: Sequence[str]) -> None:
    """Joins the linear layers of these names, which their module calls with the same rows in this order."""
    for module in model.modules():
        for names in groups:
            linears = [
                each
                for each in map(module._modules.get, names)
                if type(each) is nn.Linear and _is_plain(each) and _can_join(each.weight)
            ]
            if len(linears) < len(names) or len({each.bias is None for each in linears}) > 1:
                continue
            product, begin = _Product(linears), 0
            for name, linear in zip(names, linears, strict=True):
                setattr(module, name, JoinedLinear(linear, product, begin, last=name == names[-1]))
                begin += linear.out_features


def packed(linear: nn.Linear) -> nn.Module:
    """The packed layer; or the layer itself if it is quantised or oneDNN does not support its dtype or device."""
    return PackedLinear(linear) if _is_plain(linear) and _can_pack(linear.weight) else linear


def pack_linears(model: nn.Module) -> None:
    """Replaces all linear layers of `model` by packed ones, one at a time, so that few weights are held twice.

    The other parameters are copied if any layer was packed: they are views of the checkpoint's mapped file, and one
    view keeps all of it mapped, all weights once more.
    """
    packs = False
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                replacement = packed(child)
                setattr(module, name, replacement)
                packs |= replacement is not child
    if packs:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()


# An operator of its own is opaque to the compiler.
_library = torch.library.Library("framesieve", "FRAGMENT")
_library.define("packed_linear(Tensor rows, Tensor number, int out_features) -> Tensor")
_library.impl("packed_linear", lambda rows, number, out_features: _packed[int(number)].multiply(rows), "CPU")
_library.impl(
    "packed_linear", lambda rows, number, out_features: rows.new_empty((*rows.shape[:-1], out_features)), "Meta"
)


def _is_plain(linear: nn.Linear) -> bool:
    """Quantizers keep a layer's class but replace its weight, remove it, or override the layer's forward."""
    return "forward" not in vars(linear) and type(linear._parameters.get("weight")) in (Tensor, nn.Parameter)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and multiplies_bfloat16())


def _can_join(weight: Tensor) -> bool:
    return weight.device.type in JOINING_DEVICES or _can_pack(weight)


def multiplies_bfloat16() -> bool:
    """Whether oneDNN has kernels for bfloat16 on this processor. Without, products take many times longer."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
