"""Linear layers whose weights are reordered once for the CPU, which torch would do in every call; and linear layers of
the same rows, joined to one product, on the CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gridsieve.services.compute.device import multiplies_bfloat16
from gridsieve.services.compute.int4_linear import Int4Linear, Int4Weight, joined_bias
from gridsieve.services.compute.opaque_weight import OpaqueWeight, Weight, multiply

# Where layers are joined though their weights are not reordered.
JOINING_DEVICES = ("cuda",)
# oneDNN chooses the layout of a packed weight for this number of rows. Of the numbers tried, which ranged from one row
# to two thousand, its layout was the fastest.
PACKED_FOR_ROWS = 64


class _PackedWeight(OpaqueWeight):
    """A weight in oneDNN's layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_FOR_ROWS)
        self.bias = None if bias is None else bias.detach().clone()

    def multiply(self, rows: Tensor) -> Tensor:
        product: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self.weight, self.bias, "none", [], "")
        return product


class _PlainWeight:
    """A weight as it is. It is never compiled."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()

    def multiply(self, rows: Tensor) -> Tensor:
        return F.linear(rows, self.weight, self.bias)

    def register(self, module: nn.Module) -> None:
        module.register_buffer("number", None)


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
        return multiply(rows, self._packed, self.number, self.out_features)


class JoinedLinear(nn.Module):
    """One of several layers that are called with the same rows, one after another, and computed by the first of them.

    A product of one row takes as long as reading its weights, and small ones take longer to begin than to read. Layers
    that transformers quantised are left as they are.
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
        first = linears[0]
        self.weight: Weight
        if isinstance(first, Int4Linear):
            self.weight = Int4Weight.joined([each for each in linears if isinstance(each, Int4Linear)])
        else:
            kind = _PackedWeight if _can_pack(first.weight) else _PlainWeight
            self.weight = kind(torch.cat([each.weight for each in linears]), joined_bias(linears))
        self._out_features = sum(each.out_features for each in linears)
        self._computed: tuple[Tensor, Tensor] | None = None

    def of(self, rows: Tensor, number: Tensor, last: bool) -> Tensor:
        if self._computed is None or self._computed[0] is not rows:
            self._computed = rows, multiply(rows, self.weight, number, self._out_features)
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


def join_linears(model: nn.Module, *groups: Sequence[str]) -> None:
    """Joins the linear layers of these names, which their module calls with the same rows in this order."""
    for module in model.modules():
        for names in groups:
            linears = [each for each in map(module._modules.get, names) if isinstance(each, nn.Linear)]
            if len(linears) < len(names) or not _can_join(linears):
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


def _is_plain(linear: nn.Linear) -> bool:
    """Quantizers keep a layer's class but replace its weight, remove it, or override the layer's forward."""
    return "forward" not in vars(linear) and type(linear._parameters.get("weight")) in (Tensor, nn.Parameter)


def _can_pack(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and multiplies_bfloat16())


def _can_join(linears: Sequence[nn.Linear]) -> bool:
    if len({each.bias is None for each in linears}) > 1:
        return False
    packed = [each for each in linears if isinstance(each, Int4Linear)]
    if len(packed) == len(linears):
        return all(packed[0].int4.fits(each.int4) for each in packed)
    return all(
        type(each) is nn.Linear
        and _is_plain(each)
        and (each.weight.device.type in JOINING_DEVICES or _can_pack(each.weight))
        for each in linears
    )
