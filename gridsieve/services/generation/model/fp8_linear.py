"""Linear layers whose weights stay in fp8, and whose products are computed in fp8 where the card has a kernel for them.

    rows      [M, K]   e4m3, a scale for each row and group of 128 channels: max(largest magnitude, 1e-10) / 448
    weight    [N, K]   e4m3, a scale for each block of 128 × 128, both as stored
    product   [M, N]   Σ over groups: (rows · weight of the group) · (scale of the rows · scale of the weight)

torch computes it by `scaled_mm`, for which cuBLAS has a kernel on Hopper only. It is tried at startup on the sizes of
the model, against `product_by_formula`, which is slow and runs on any device. Experts stay in fp8 without it, too, with
scales of any blocks: a part of their rows is dequantised at a time (`dequantising`).
Source: DeepSeek-V3, arXiv 2412.19437, section 3.3; layouts of scales: aten/src/ATen/native/cuda/ScaledBlas.cpp.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor, nn

FP8 = torch.float8_e4m3fn
GROUP = 128
SCALE = "_scale_inv"  # after the name of a weight whose scales are of blocks
LEAST = 1e-10
# cuBLAS reads the scales of rows, which are adjacent in a group, in pieces of 16 bytes. 16 rows also fill its tiles.
ROWS = 16
# And those of weights with a stride of a multiple of this many groups.
GROUPS = 4
# How many rows of a weight are dequantised at a time, about.
PART = 256
# 0x87F0 as an int16: of e4m3 as bfloat16 the sign, which widening copied to the bits after it, and the seven others.
_SIGN_AND_VALUE = -0x7810
# Maximum difference between two correct products in bfloat16, as a share of the largest number.
TOLERANCE = 1e-2

log = structlog.get_logger()


class Product(Protocol):
    def __call__(self, rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
        """rows: [M, K], any float dtype, also that of the result [M, N].

        weight: e4m3 [N, K]; scales: float32, one for each block of it.
        """


class Fp8Linear(nn.Linear):
    """A linear layer stored in fp8: [.., in_features] to [.., out_features]. What shards it stays around it."""

    def __init__(
        self, linear: nn.Linear, product: Product, sides: Sequence[int] = (GROUP, GROUP), scale: str = SCALE
    ) -> None:
        """linear: whose sizes, bias and device the layer has; its weight is not used.

        product: for scales of blocks of these `sides`, see `grid`. scale: what follows `weight` in their name.
        """
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = nn.Parameter(torch.empty_like(linear.weight, dtype=FP8), requires_grad=False)
        scales = linear.weight.new_empty(grid(linear.weight.shape, sides), dtype=torch.float32)
        self._scales = f"weight{scale}"
        self.register_parameter(self._scales, nn.Parameter(scales, requires_grad=False))
        self.bias = linear.bias
        self._product = product

    def forward(self, rows: Tensor) -> Tensor:
        product = self._product(rows.flatten(0, -2), self.weight, self.get_parameter(self._scales))
        product = product.view(*rows.shape[:-1], len(self.weight))
        return product if self.bias is None else product + self.bias


def grid(shape: Sequence[int], sides: Sequence[int]) -> list[int]:
    """The shape of the scales of a weight [.., N, K]. sides: rows and columns of a block, 0 for all; the last may be a
    partial one."""
    return [*shape[:-2], *(-(-size // (side or size)) for size, side in zip(shape[-2:], sides, strict=True))]


def dequantised(weight: Tensor, scales: Tensor, sides: Sequence[int]) -> Tensor:
    """float32 [.., N, K]. scales: float32, of the shape `grid`."""
    for axis, side in zip((-2, -1), sides, strict=True):
        if scales.shape[axis] > 1:
            scales = scales.repeat_interleave(side, axis).narrow(axis, 0, weight.shape[axis])
    return _in_float32(weight).mul_(scales)


def _in_float32(weight: Tensor) -> Tensor:
    """torch converts e4m3 on the CPU one by one. In bfloat16 the same bits, moved to its exponent and fraction, stand
    for 2 ** -120 of the value, also where it is subnormal. NaN, which no weight is, becomes 480."""
    if weight.device.type != "cpu":
        return weight.float()
    bits = weight.view(torch.int8).short().bitwise_left_shift_(4).bitwise_and_(_SIGN_AND_VALUE)
    return bits.view(torch.bfloat16).float().mul_(2.0**120)


def dequantising(sides: Sequence[int]) -> Product:
    """A product in the dtype of the rows, for scales of blocks of these sides."""
    return partial(_dequantised_product, sides)


def _dequantised_product(sides: Sequence[int], rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    side = sides[0] or len(weight)
    blocks = -(-PART // side)
    product = rows.new_empty(len(rows), len(weight))
    parts = weight.split(blocks * side), scales.split(blocks), product.split(blocks * side, 1)
    for own, own_scales, to in zip(*parts, strict=True):
        torch.mm(rows, dequantised(own, own_scales, sides).to(rows.dtype).t(), out=to)
    return product


def fits(linear: nn.Linear) -> bool:
    """Whether products in fp8 support the layer's sizes."""
    return linear.in_features % GROUP == 0 and linear.out_features % GROUP == 0


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """rows: [M, K], any float dtype. Returns e4m3 [M, K], contiguous, and scales, float32 [M, K / 128]."""
    groups = rows.unflatten(1, (-1, GROUP))
    most = torch.linalg.vector_norm(groups, torch.inf, dim=2).float()  # one kernel; a maximum is exact in any dtype
    scales = most.clamp(min=LEAST) / torch.finfo(FP8).max
    # A quotient may exceed 448 by its last bit, which rounds to 448.
    return (groups / scales[:, :, None]).to(FP8).flatten(1).contiguous(), scales


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight: [N, K], any float dtype, of multiples of 128. Returns e4m3 [N, K] and scales, float32 [N / 128, K / 128]:
    the largest magnitude of a block / 448."""
    blocks = weight.float().unflatten(1, (-1, GROUP)).unflatten(0, (-1, GROUP))
    scales = blocks.abs().amax((1, 3)).clamp(min=LEAST) / torch.finfo(FP8).max
    return (blocks / scales[:, None, :, None]).to(FP8).flatten(2).flatten(0, 1), scales


def scaled_product(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """`Product` by torch's kernel."""
    count, groups = rows.shape[0], scales.shape[1]
    padded = F.pad(rows, (0, 0, 0, -count % ROWS)) if count % ROWS else rows
    values, row_scales = quantise(padded)
    weight_scales = F.pad(scales, (0, -groups % GROUPS)) if groups % GROUPS else scales
    product = F.scaled_mm(
        values,
        weight.t(),
        row_scales.t().contiguous().t(),
        F.ScalingType.BlockWise1x128,
        weight_scales.t(),
        F.ScalingType.BlockWise128x128,
        output_dtype=rows.dtype,
    )
    return product[:count]


def product_by_formula(rows: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    """`Product`, the same bits on every device and for every number of rows."""
    values, row_scales = quantise(rows)
    total = row_scales.new_zeros(len(rows), len(weight))
    for group in range(scales.shape[1]):
        own = slice(group * GROUP, (group + 1) * GROUP)
        # Exact in float64, so in any order of additions.
        products = values[:, own].double() @ weight[:, own].double().T
        total += products.float() * (row_scales[:, group, None] * scales[:, group].repeat_interleave(GROUP))
    return total.to(rows.dtype)


def find_product(sizes: Collection[tuple[int, int]], like: Tensor) -> Product | None:
    """torch's kernel, if it passes `check_product` on the device and in the dtype of `like`; None if weights must be
    dequantised, which is faster on a CPU.

    sizes: out_features and in_features of the layers.
    """
    error = "no kernel on this device"
    if like.device.type == "cuda":
        try:
            check_product(scaled_product, sizes, like)
        except Exception as failure:  # kernels for other cards may fail in any way
            error = str(failure)
        else:
            log.info("products in fp8", device=str(like.device))
            return scaled_product
    log.info("no products in fp8: weights are dequantised", device=str(like.device), error=error)
    return None


def check_product(product: Product, sizes: Collection[tuple[int, int]], like: Tensor) -> None:
    """Compares a product with the formula, with scales that differ everywhere.

    Raises the product's exceptions, and AssertionError for a wrong result.
    """
    draw = torch.Generator(like.device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=like.device)

    for out_features, in_features in sizes:
        weight, scales = random(out_features, in_features).to(FP8), random(out_features // GROUP, in_features // GROUP)
        for count in (1, ROWS + 1):
            rows = random(count, in_features // GROUP, GROUP) * random(count, in_features // GROUP, 1)
            rows = rows.flatten(1).to(like.dtype)
            expected = product_by_formula(rows, weight, scales).float()
            difference = float((product(rows, weight, scales).float() - expected).abs().max() / expected.abs().max())
            assert difference < TOLERANCE, (
                f"a product of {count} rows with {out_features} × {in_features} differs by {difference}"
            )
