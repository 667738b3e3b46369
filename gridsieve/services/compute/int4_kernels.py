# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""Kernels of Triton for weights in 4 bits in torch's layout for CUDA, which dequantise a tile at a time.

    packed     int32 [N / 8, K / 128, 8, 4, 4]   tile of 8 rows, block of 128 columns, row, q, p
               8 values of one row each          value 4 o + 2 t + h, from the lowest bits on
    column     32 p + 16 t + 8 h + 2 q + o       within the block

A product dequantises each weight once for each tile of rows, and writes no dequantised weight to memory. Only a process
that has Triton, which comes with torch for CUDA, may import this module. No card has run it: tests run its arithmetic
by Triton's interpreter. Triton 3.7 compiles it for compute capabilities 8.0 and 9.0; the estimates below are counts of
the instructions that it makes for 9.0.
Source: the layout is that of aten/src/ATen/native/cuda/int4mm.cu.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# For more rows, the weights are dequantised once and multiplied by torch. Estimate: dequantising costs a tile twice its
# multiplications, and writing and reading all weights in bfloat16 costs as much at about so many rows.
MOST_ROWS = 1024
# Rows and outputs of a product's tile. Fewer outputs use more of the card where a product has few tiles.
TILE_ROWS, TILE_OUTPUTS = 128, (64, 32)
_DENSE_ROWS = 32


@triton.jit
def _weights(packed, scales, row, block, blocks, group, stride, dtype: tl.constexpr):
    """[R, 128]: the columns of a block of rows `row`, [R]. stride: of scales, [G, N, 2], from one group to the next."""
    rows: tl.constexpr = row.shape[0]
    number = tl.arange(0, 16)  # 4 q + p
    numbers = tl.load(packed + (row[:, None] // 8 * blocks + block) * 128 + row[:, None] % 8 * 16 + number[None, :])
    at = (block * 128 + number[None, :] % 4 * 32) // group * stride + 2 * row[:, None]
    scale, zero = tl.load(scales + at).to(tl.float32), tl.load(scales + at + 1).to(tl.float32)
    least = zero - 8 * scale
    values = (numbers[:, None, :] >> (4 * tl.arange(0, 8))[None, :, None]) & 15  # [R, 8, 16]
    weights = (values.to(tl.float32) * scale[:, None, :] + least[:, None, :]).to(dtype)
    parts = tl.reshape(weights, [rows, 2, 2, 2, 4, 4])  # o, t, h, q, p
    return tl.reshape(tl.permute(parts, [0, 5, 2, 3, 4, 1]), [rows, 128])


@triton.jit(do_not_specialize=["num_rows", "blocks"])
def _multiply(
    rows,
    packed,
    scales,
    product,
    num_rows,
    outputs,
    blocks,
    group,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
):
    """rows: [num_rows, 128 · blocks]. product: [num_rows, outputs]."""
    row = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows)
    output = tl.program_id(1) * tile_outputs + tl.arange(0, tile_outputs)
    read = rows + (row % num_rows)[:, None] * blocks * 128 + tl.arange(0, 128)[None, :]
    sums = tl.zeros([tile_rows, tile_outputs], tl.float32)
    for block in range(blocks):
        own = tl.load(read + block * 128)
        weights = _weights(packed, scales, output % outputs, block, blocks, group, 2 * outputs, own.dtype)
        sums = tl.dot(own, tl.trans(weights), sums)
    inside = (row < num_rows)[:, None] & (output < outputs)[None, :]
    tl.store(product + row[:, None] * outputs + output[None, :], sums.to(product.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["blocks"])
def _dequantise(packed, scales, dense, blocks, group, stride, tile_rows: tl.constexpr):
    """dense: [N, 128 · blocks]."""
    row, block = tl.program_id(0) * tile_rows + tl.arange(0, tile_rows), tl.program_id(1)
    weights = _weights(packed, scales, row, block, blocks, group, stride, dense.dtype.element_ty)
    tl.store(dense + (row[:, None] * blocks + block) * 128 + tl.arange(0, 128)[None, :], weights)


class TritonKernels:
    """Implements `Int4Kernels`. num_multiprocessors: of the device."""

    most_rows = MOST_ROWS

    def __init__(self, num_multiprocessors: int) -> None:
        self._num_multiprocessors = num_multiprocessors

    def product(self, rows: Tensor, packed: Tensor, group: int, scales: Tensor) -> Tensor:
        outputs = scales.shape[1]
        product = rows.new_empty(len(rows), outputs)
        tiles, tile_outputs = self.tiles(len(rows), outputs)
        _multiply[tiles](
            *(rows, packed, scales, product, len(rows), outputs, packed.shape[1], group, TILE_ROWS, tile_outputs),
            num_warps=8,
            num_stages=2,
        )
        return product

    def tiles(self, rows: int, outputs: int) -> tuple[tuple[int, int], int]:
        """How many tiles a product has each way, and how many outputs each: those that take fewer turns, by size."""
        each_way = {size: (triton.cdiv(rows, TILE_ROWS), triton.cdiv(outputs, size)) for size in TILE_OUTPUTS}

        def cost(size: int) -> int:
            across, down = each_way[size]
            return size * int(triton.cdiv(across * down, self._num_multiprocessors))

        size = min(TILE_OUTPUTS, key=cost)
        return each_way[size], size

    def dense(self, packed: Tensor, scales: Tensor, room: Tensor) -> Tensor:
        groups, rows, _ = scales.shape
        blocks = packed.shape[1]
        _dequantise[rows // _DENSE_ROWS, blocks](
            packed, scales, room, blocks, 128 * blocks // groups, scales.stride(0), _DENSE_ROWS
        )
        return room.view(rows, -1)


def kernels_of(device: torch.device) -> TritonKernels:
    return TritonKernels(torch.cuda.get_device_properties(device).multi_processor_count)
