"""Linear layers whose weights stay in 4 bits, multiplied by torch's int4 products.

    weight    [N, K]    values of 4 bits: value · scale + least, a scale and a least for each row and group of columns
    torch's   zero      least + 8 · scale, because its products compute (value − 8) · scale + zero

torch has fast products for a few rows in bfloat16, on CPUs with AVX2 and on CUDA from Ampere on, each over a layout of
its own. On CUDA, `int4_kernels` has products for more rows. Still more are multiplied by weights that are dequantised a
few at a time: for them this is faster, and those products have no limit of rows. In other dtypes and on other devices
all rows are. Every layout that torch makes is tried when it is first used, against the formula; without one, weights
are stored in a layout of this module's own.

Source: aten/src/ATen/native/cpu/int4mm_kernel.cpp and native/cuda/int4mm.cu.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, Self

import structlog
import torch
from torch import Tensor, nn

from gridsieve.services.compute.device import multiplies_bfloat16
from gridsieve.services.compute.opaque_weight import OpaqueWeight, multiply

# Numbers of columns that torch's products take as a group.
GROUPS = (256, 128, 64, 32)
# Rows and columns must be multiples of these for torch's layouts: blocks of 64 rows on AVX-512, 8 tiles of 16 columns
# on CUDA.
_ROWS, _COLUMNS = 64, 128
# How many rows are dequantised at a time.
_CPU_PART, _CUDA_PART = 256, 2048
# Most rows of torch's product on CUDA. An estimate, by published times of both ways on one card: no card has run it.
TORCH_ROWS = 64
# Maximum difference between two correct products in bfloat16, as a share of the largest number.
_TOLERANCE = 1e-2

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Int4Matrix:
    """A matrix [N, K] in 4 bits: column order[k] of row n is values[n, k] · scales[n, g] + least[n, g], g = k // size.

    values: uint8 [N, K], 0 to 15. scales, least: float32 [N, G], for groups of size = K / G columns. order: int64 [K],
    None if columns are in their own order.
    """

    values: Tensor
    scales: Tensor
    least: Tensor
    order: Tensor | None = None

    @property
    def group(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]

    def in_groups(self) -> Self:
        """The matrix with groups of a size that torch's products take, smaller ones or its own.

        Raises ValueError if none fits.
        """
        size = next((each for each in GROUPS if self.group % each == 0), None)
        if size is None:
            raise ValueError(f"its groups of {self.group} inputs are no multiple of {GROUPS[-1]}")
        times = self.group // size
        scales, least = (each.repeat_interleave(times, 1) for each in (self.scales, self.least))
        return replace(self, scales=scales, least=least)

    def dense(self) -> Tensor:
        """float32 [N, K], columns in their own order."""
        values = self.values.unflatten(1, (-1, self.group)).float()
        dense = (values * self.scales[:, :, None] + self.least[:, :, None]).flatten(1)
        return dense if self.order is None else torch.empty_like(dense).index_copy_(1, self.order, dense)


def rounded_to_nearest(weight: Tensor, group: int) -> Int4Matrix:
    """The nearest of 16 evenly spaced values between the least and the largest of each row and group of columns.

    weight: [N, K], any float dtype; K must be a multiple of `group`.
    """
    parts = [_rounded(each.float().unflatten(1, (-1, group))) for each in weight.split(_CPU_PART)]
    return Int4Matrix(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _rounded(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of [n, G, group]: values, scales and least."""
    least, most = groups.aminmax(dim=2)
    scales = ((most - least) / 15).clamp(min=torch.finfo(torch.float32).tiny)
    values = ((groups - least[:, :, None]) / scales[:, :, None]).round_().clamp_(max=15).to(torch.uint8)
    return values.flatten(1), scales, least


class Layout(Protocol):
    """How values and scales are stored, and what is multiplied by them.

    few_rows: most rows for which `product` is the faster way. part: rows of weights that are dequantised at a time.
    """

    few_rows: int
    part: int

    def pack(self, values: Tensor) -> Tensor:
        """uint8 [N, K] to a tensor whose first dimension divides N."""

    def dense(self, packed: Tensor, scales: Tensor, room: Tensor) -> Tensor:
        """The weights [n, K] of a part of the first dimension, written into `room`, [n · K], of any float dtype.

        scales: of its rows, [G, n, 2].
        """

    def product(self, rows: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
        """[M, K] to [M, N]. scales: [K / group, N, 2], scales and torch's zeros."""


class PlainLayout:
    """Bytes of two values each [N, K / 32, 16]: the first and the second half of 32 columns. It has no product."""

    few_rows = 0

    def __init__(self, part: int) -> None:
        self.part = part

    def pack(self, values: Tensor) -> Tensor:
        low, high = values.unflatten(1, (-1, 2, 16)).unbind(2)
        packed: Tensor = low | high << 4
        return packed

    def dense(self, packed: Tensor, scales: Tensor, room: Tensor) -> Tensor:
        return _scaled(_both(packed).flatten(1), scales, room)

    def product(self, rows: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
        raise NotImplementedError


class CpuLayout:
    """torch's on CPUs with AVX2 and AVX-512: bytes [N / B, K, B / 2] of the first and the second half of B rows."""

    # With AVX2 on two cores, 2048 × 2048: 64 rows in 15 ms by the product, in 24 dequantised; 256 rows in 62 and 56.
    few_rows = 96
    part = _CPU_PART

    def __init__(self, block: int) -> None:
        self._block = block

    def pack(self, values: Tensor) -> Tensor:
        # torch takes int32, four bytes for each half one.
        pieces = values.split(_CPU_PART)
        packed = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(each.int(), 1) for each in pieces]
        return torch.cat(packed).view(-1, values.shape[1], self._block // 2)

    def dense(self, packed: Tensor, scales: Tensor, room: Tensor) -> Tensor:
        columns = packed.shape[1]
        values = _both(packed).view(torch.int8).sub_(8)  # [n / B, K, B]
        dense = (
            room.view(columns, len(packed), self._block)
            .copy_(values.transpose(0, 1))
            .view(len(scales), -1, scales.shape[1])
        )
        scale, zero = scales.permute(2, 0, 1).to(room.dtype).contiguous()[:, :, None]  # [G, 1, n]
        return torch.addcmul(zero, dense, scale, out=dense).view(columns, -1).t()

    def product(self, rows: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
        flat = packed.view(-1, packed.shape[1] // 2)
        product: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, flat, group, scales)
        return product


class Int4Kernels(Protocol):
    """For `CudaLayout`, of any float dtype. most_rows: for which `product` is the faster way."""

    most_rows: int

    def product(self, rows: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
        """As `Layout.product`; all are contiguous."""

    def dense(self, packed: Tensor, scales: Tensor, room: Tensor) -> Tensor:
        """As `Layout.dense`."""


class CudaLayout:
    """torch's on CUDA: int32 [N / 8, K / 128, 32, 4], tiles of 8 rows and 16 columns by the threads that read them.

    kernels: for more rows than torch's product is for; without, their weights are dequantised by torch's operators.
    """

    part = _CUDA_PART

    def __init__(self, kernels: Int4Kernels | None = None) -> None:
        self._kernels = kernels
        self.few_rows = kernels.most_rows if kernels else TORCH_ROWS

    def pack(self, values: Tensor) -> Tensor:
        pairs: Tensor = values[:, ::2] << 4 | values[:, 1::2]
        packed: Tensor = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), _COLUMNS // 16)
        return packed

    def dense(self, packed: Tensor, scales: Tensor, room: Tensor) -> Tensor:
        if self._kernels:
            return self._kernels.dense(packed, scales, room)
        tiles, blocks = packed.shape[:2]
        # Bytes by row, pair of columns, pair of tiles, parity of the column, tile; in a byte two halves of a tile.
        each = packed.view(torch.uint8).view(tiles, blocks, 8, 4, 4, 2, 2)
        both = torch.stack((each & 15, each >> 4), -1)
        values = both.permute(0, 2, 1, 4, 6, 7, 3, 5).reshape(8 * tiles, blocks * _COLUMNS)
        return _scaled(values, scales, room)

    def product(self, rows: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
        if self._kernels and len(rows) > TORCH_ROWS:
            return self._kernels.product(rows, packed, group, scales)
        product: Tensor = torch.ops.aten._weight_int4pack_mm(rows, packed, group, scales)
        return product


def _both(packed: Tensor) -> Tensor:
    """The values of bytes [.., B / 2]: [.., B]."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _scaled(values: Tensor, scales: Tensor, room: Tensor) -> Tensor:
    """(value - 8) · scale + zero of uint8 [n, K], which is overwritten, with scales [G, n, 2], in `room`: [n, K]."""
    dense = room.view(len(values), len(scales), -1)
    dense.copy_(values.view(torch.int8).sub_(8).view(dense.shape))
    scale, zero = scales.permute(2, 1, 0).to(room.dtype).contiguous()[..., None]  # [n, G, 1]
    return torch.addcmul(zero, dense, scale, out=dense).flatten(1)


@cache
def layout_of(dtype: torch.dtype, device: torch.device) -> Layout:
    """torch's layout for rows of this dtype on this device, if it has one with right products, or the plain one."""
    plain = PlainLayout(_CUDA_PART if device.type == "cuda" else _CPU_PART)
    if dtype != torch.bfloat16:
        return plain
    makes: list[Callable[[], Layout]]
    if device.type == "cuda":
        makes = [lambda: CudaLayout(_kernels_of(device)), CudaLayout]
    else:
        capability = torch.backends.cpu.get_cpu_capability()
        if not capability.startswith(("AVX2", "AVX512")):
            return plain
        makes = [lambda: CpuLayout(32 if capability == "AVX2" else 64)]
    for make in makes:
        try:
            found = make()
            check_layout(found, device)
        except Exception as error:  # kernels for other processors may fail in any way
            log.warning("products in int4 do not work here", device=str(device), error=str(error))
        else:
            return found
    log.warning("weights in 4 bits are dequantised in each call", device=str(device))
    return plain


def _kernels_of(device: torch.device) -> Int4Kernels:
    """Raises ImportError without Triton."""
    kernels: Int4Kernels = importlib.import_module("gridsieve.services.compute.int4_kernels").kernels_of(device)
    return kernels


def check_layout(layout: Layout, device: torch.device) -> None:
    """Compares products with the formula. Raises the products' exceptions, and AssertionError for a wrong result."""
    draw = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (2 * _ROWS, 2 * _COLUMNS), generator=draw, dtype=torch.uint8)
    scales, least = (torch.randn(2 * _ROWS, 4, generator=draw) for _ in range(2))
    matrix = Int4Matrix(*(each.to(device) for each in (values, scales, least)))
    weight = Int4Weight(matrix, torch.bfloat16, layout)
    for rows in (torch.randn(count, 2 * _COLUMNS, generator=draw).to(device) for count in (1, 5, layout.few_rows)):
        exact = rows.bfloat16().float() @ matrix.dense().T
        for found in (weight.few(rows.bfloat16()), weight.many(rows.bfloat16())):
            difference = float((found.float() - exact).abs().max() / exact.abs().max())
            assert difference < _TOLERANCE, f"a product of {len(rows)} rows differs by {difference}"


class Int4Weight(OpaqueWeight):
    """A packed matrix, or several that are joined, with their biases."""

    def __init__(self, matrix: Int4Matrix, dtype: torch.dtype, layout: Layout | None = None) -> None:
        """matrix: in groups of `GROUPS`, on its device. dtype: of the rows. layout: None: the best one for them."""
        zeros = matrix.least + 8 * matrix.scales
        scales = torch.stack((matrix.scales, zeros), -1).transpose(0, 1).to(dtype).contiguous()
        rows, columns = matrix.values.shape
        if layout is None:
            fits = rows % _ROWS == 0 and columns % _COLUMNS == 0
            layout = layout_of(dtype if fits else torch.float32, matrix.values.device)
        self._set(layout, layout.pack(matrix.values), scales, matrix.group, matrix.order, None)

    def _set(
        self, layout: Layout, packed: Tensor, scales: Tensor, group: int, order: Tensor | None, bias: Tensor | None
    ) -> None:
        """scales: [G, N, 2], of the rows' dtype: scales and torch's zeros."""
        super().__init__()
        self.layout, self._packed, self._scales, self._group = layout, packed, scales, group
        self.shape = torch.Size((scales.shape[1], scales.shape[0] * group))
        self._order, self._bias = order, bias

    @classmethod
    def joined(cls, linears: Sequence[Int4Linear]) -> Self:
        """The weights of layers that fit one another, and their biases."""
        weights = [each.int4 for each in linears]
        joined, first = cls.__new__(cls), weights[0]
        packed, scales = torch.cat([each._packed for each in weights]), torch.cat([each._scales for each in weights], 1)
        joined._set(first.layout, packed, scales, first._group, first._order, joined_bias(linears))
        return joined

    def fits(self, other: Int4Weight) -> bool:
        """Whether both can be joined."""
        own, its = self._order, other._order
        same = own is its or (own is not None and its is not None and torch.equal(own, its))
        return same and (self._group, self.layout) == (other._group, other.layout)

    @property
    def size_bytes(self) -> int:
        return self._packed.nbytes + self._scales.nbytes

    def multiply(self, rows: Tensor) -> Tensor:
        flat = rows.flatten(0, -2)
        if self._order is not None:
            flat = flat.index_select(1, self._order)
        product = self.few(flat) if 0 < len(flat) <= self.layout.few_rows else self.many(flat)
        if self._bias is not None:
            product += self._bias
        return product.view(*rows.shape[:-1], product.shape[1])

    def few(self, rows: Tensor) -> Tensor:
        """By torch's product. rows: [M, K], columns in the order of the weight's. Returns [M, N], without the bias."""
        return self.layout.product(rows.contiguous(), self._packed, self._group, self._scales)

    def many(self, rows: Tensor) -> Tensor:
        """As `few`, by dequantised weights."""
        dtype = rows.dtype
        if rows.device.type == "cpu" and dtype == torch.bfloat16 and not multiplies_bfloat16():
            rows = rows.float()
        outputs, columns = self.shape
        part = min(self.layout.part, outputs)
        room, product = rows.new_empty(part * columns), rows.new_empty(len(rows), outputs)
        packed = self._packed.split(part * len(self._packed) // outputs)
        for each, scales, to in zip(packed, self._scales.split(part, 1), product.split(part, 1), strict=True):
            dense = self.layout.dense(each, scales, room[: scales.shape[1] * columns])
            torch.mm(rows, dense.t(), out=to)
        return product.to(dtype)


class Int4Linear(nn.Linear):
    """The class that a linear layer takes on whose weight stays in 4 bits. What shards it stays around it.

    int4: in place of its parameter `weight`, see `set_weight`.
    """

    int4: Int4Weight
    number: Tensor

    def set_weight(self, weight: Int4Weight) -> None:
        del self._parameters["weight"]
        self.int4 = weight
        weight.register(self)

    def forward(self, rows: Tensor) -> Tensor:
        product = multiply(rows, self.int4, self.number, self.out_features)
        return product if self.bias is None else product + self.bias


def joined_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    found = [each.bias.detach() for each in linears if each.bias is not None]
    return torch.cat(found) if found else None
