# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs
"""Kernels of Triton that advance recurrent states within their slots: one reading and one writing of each state.

    matrices  float32 [slots, heads, rows, columns]      read, write: int64 [R], a slot of each sequence, with a stride
    rows      convolved [R, L, channels], gates [R, L, heads], out [R, L, heads, head_dim], all contiguous
    a call    takes tokens start to end − 1 of the L tokens of each sequence; with none it copies states

Without them, the states of a step are gathered from their slots, advanced, and scattered: each is read and written
three times. The kernels of flash-linear-attention take no slots; those of mamba-ssm read and write the same one, and a
step that failed must find the state before it. Only a process that has Triton may import this module. No card has run
it: tests run it by Triton's interpreter, and Triton 3.7 compiles it for compute capabilities 8.0 and 9.0.
Source: the formulas are those of arXiv 2412.06464 and arXiv 2405.21060, as transformers' functions compute them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gridsieve.services.generation.model.slot_steps import SlotSteps

# What a program has of a head: so many columns of a delta network's matrix, or rows of a scan's, in the registers of
# one warp.
_PART = 16


@triton.jit(do_not_specialize=["read_stride", "write_stride", "start", "end", "tokens"])
def _delta(
    matrices,
    read,
    write,
    read_stride,
    write_stride,
    convolved,
    beta,
    decay,
    out,
    start,
    end,
    tokens,
    key_heads: tl.constexpr,
    value_heads: tl.constexpr,
    key_dim: tl.constexpr,
    value_dim: tl.constexpr,
    key_block: tl.constexpr,
    part: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    key, value = tl.arange(0, key_block), tl.program_id(2) * part + tl.arange(0, part)
    of_keys: tl.constexpr = key_heads * key_dim
    query_at = head // (value_heads // key_heads) * key_dim + key
    place = head * key_dim * value_dim + key[:, None] * value_dim + value[None, :]
    inside = (key < key_dim)[:, None] & (value < value_dim)[None, :]
    size: tl.constexpr = value_heads * key_dim * value_dim
    state = tl.load(matrices + tl.load(read + sequence * read_stride) * size + place, inside, 0.0)  # [keys, values]
    for token in range(start, end):
        row = sequence * tokens + token
        channels = convolved + row * (2 * of_keys + value_heads * value_dim)
        q = tl.load(channels + query_at, key < key_dim, 0.0).to(tl.float32)
        k = tl.load(channels + of_keys + query_at, key < key_dim, 0.0).to(tl.float32)
        v = tl.load(channels + 2 * of_keys + head * value_dim + value, value < value_dim, 0.0).to(tl.float32)
        q = q * (tl.rsqrt(tl.sum(q * q) + 1e-6) / tl.sqrt(key_dim + 0.0))
        k = k * tl.rsqrt(tl.sum(k * k) + 1e-6)
        state = state * tl.exp(tl.load(decay + row * value_heads + head).to(tl.float32))
        missing = v - tl.sum(state * k[:, None], 0)
        state += k[:, None] * (missing * tl.load(beta + row * value_heads + head).to(tl.float32))[None, :]
        at = out + (row * value_heads + head) * value_dim + value
        tl.store(at, tl.sum(state * q[:, None], 0).to(out.dtype.element_ty), value < value_dim)
    tl.store(matrices + tl.load(write + sequence * write_stride) * size + place, state, inside)


@triton.jit(do_not_specialize=["read_stride", "write_stride", "start", "end", "tokens"])
def _scan(
    matrices,
    read,
    write,
    read_stride,
    write_stride,
    convolved,
    time_steps,
    rates,
    skip,
    out,
    start,
    end,
    tokens,
    heads: tl.constexpr,
    head_dim: tl.constexpr,
    groups: tl.constexpr,
    state_dim: tl.constexpr,
    state_block: tl.constexpr,
    part: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    column, channel = tl.arange(0, state_block), tl.program_id(2) * part + tl.arange(0, part)
    of_x: tl.constexpr = heads * head_dim
    b_at = of_x + head // (heads // groups) * state_dim + column
    place = (head * head_dim + channel[:, None]) * state_dim + column[None, :]
    inside = (channel < head_dim)[:, None] & (column < state_dim)[None, :]
    size: tl.constexpr = heads * head_dim * state_dim
    state = tl.load(
        matrices + tl.load(read + sequence * read_stride) * size + place, inside, 0.0
    )  # [head_dim, state_dim]
    rate, direct = tl.load(rates + head), tl.load(skip + head)
    for token in range(start, end):
        row = sequence * tokens + token
        channels = convolved + row * (of_x + 2 * groups * state_dim)
        x = tl.load(channels + head * head_dim + channel, channel < head_dim, 0.0).to(tl.float32)
        b = tl.load(channels + b_at, column < state_dim, 0.0).to(tl.float32)
        c = tl.load(channels + groups * state_dim + b_at, column < state_dim, 0.0).to(tl.float32)
        time_step = tl.load(time_steps + row * heads + head).to(tl.float32)
        state = state * tl.exp(time_step * rate) + x[:, None] * (time_step * b)[None, :]
        y = tl.sum(state * c[None, :], 1) + direct * x
        tl.store(out + (row * heads + head) * head_dim + channel, y.to(out.dtype.element_ty), channel < head_dim)
    tl.store(matrices + tl.load(write + sequence * write_stride) * size + place, state, inside)


class TritonStates:
    """Implements `SlotKernels`."""

    def delta(self, steps: SlotSteps, key_heads: int) -> None:
        _, value_heads, key_dim, value_dim = steps.matrices.shape
        _delta[len(steps.slots[0]), value_heads, triton.cdiv(value_dim, _PART)](
            *_arguments(steps),
            *(key_heads, value_heads, key_dim, value_dim, triton.next_power_of_2(key_dim), _PART),
            num_warps=1,
        )

    def scan(self, steps: SlotSteps, groups: int) -> None:
        _, heads, head_dim, state_dim = steps.matrices.shape
        _scan[len(steps.slots[0]), heads, triton.cdiv(head_dim, _PART)](
            *_arguments(steps),
            *(heads, head_dim, groups, state_dim, triton.next_power_of_2(state_dim), _PART),
            num_warps=1,
        )


def _arguments(steps: SlotSteps) -> tuple[Tensor | int, ...]:
    strides = (each.stride(0) for each in steps.slots)
    return steps.matrices, *steps.slots, *strides, *steps.rows, *steps.tokens
