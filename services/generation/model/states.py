"""The recurrent states of layers that keep one per sequence instead of keys and values: slots, written once each.

    chunk [start, end) of a sequence     reads the slot of the state after `start` tokens, writes another one
    snapshots within the chunk           further slots, each with the state after some of its tokens
    a row that decodes                   a step of its own; all such rows are one batch

Nothing is written to a slot that is read, so a step that failed can be computed again from the same states. Slot ZERO
is the state before the first token and never written; slot PADDING is written by rows that only fill a batch.

A state is float32: the last inputs of the convolution, and the matrix of each head. transformers' functions compute it:
on a card with the package fla they are its kernels, which are tried at the start, else torch's operators.
Source: gated delta networks, arXiv 2412.06464; `transformers.models.qwen3_5`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule

from framesieve.services.compute.kernels import check_result
from framesieve.services.compute.transfers import to_device
from framesieve.services.generation.request.batch import Packed, StateUse
from framesieve.services.generation.request.request import NO_STATE

ZERO, PADDING = NO_STATE, 1
# Slots that hold no sequence's state: those two.
RESERVED = 2
_BYTES = 4

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Kernels:
    """transformers' functions of the gated delta rule: for a chunk of a sequence, for one token of each of several."""

    chunk: Callable[..., tuple[Tensor, Tensor]]
    step: Callable[..., tuple[Tensor, Tensor]]


_BY_TORCH = Kernels(
    inspect.unwrap(torch_chunk_gated_delta_rule),
    inspect.unwrap(torch_recurrent_gated_delta_rule),
)
_INSTALLED = Kernels(torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule)


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Of one state. layers: that keep one. channels: of the convolution, whose kernel has `kernel` taps.

    key_heads, value_heads: each key head serves value_heads / key_heads value heads. key_dim, value_dim: of one head.
    """

    layers: int
    channels: int
    kernel: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def bytes(self) -> int:
        """Of one slot, in all layers."""
        matrices = self.value_heads * self.key_dim * self.value_dim
        return _BYTES * self.layers * (self.channels * (self.kernel - 1) + matrices)


@torch.inference_mode()
def find_kernels(sizes: StateSizes, like: Tensor) -> Kernels:
    """The fastest that work on the device and in the dtype of `like`. No card has run any of them here yet."""
    if like.device.type != "cuda":
        return _BY_TORCH
    draw = torch.Generator(like.device).manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.rand(shape, generator=draw, device=like.device).mul(2).sub(1)

    try:
        for tokens, installed, exact in ((70, _INSTALLED.chunk, _BY_TORCH.chunk), (1, _INSTALLED.step, _BY_TORCH.step)):
            keys, values = (1, tokens, sizes.key_heads, sizes.key_dim), (1, tokens, sizes.value_heads, sizes.value_dim)
            rows = drawn(*keys), drawn(*keys), drawn(*values)
            state = drawn(1, sizes.value_heads, sizes.key_dim, sizes.value_dim)
            more = {
                "g": -drawn(*values[:3]).abs(),
                "beta": drawn(*values[:3]).sigmoid(),
                "output_final_state": True,
                "use_qk_l2norm_in_kernel": True,
            }
            found = installed(*(each.to(like.dtype) for each in rows), initial_state=state.clone(), **more)
            expected = exact(*rows, initial_state=state.clone(), **more)
            for one, other in zip(found, expected, strict=True):
                check_result(one, other)
    except Exception as error:  # a kernel that is compiled for the card may fail in any way
        log.warning("recurrent states are computed by torch: fla does not work", error=str(error))
        return _BY_TORCH
    return _INSTALLED


class StateCache:
    """The slots of every layer: inputs of the convolution, and matrices, float32."""

    def __init__(self, sizes: StateSizes, slots: int, like: Tensor) -> None:
        """slots: their number, the reserved ones included. like: of the model's device."""
        self.sizes = sizes
        self.kernels = find_kernels(sizes, like)
        inputs = (slots, sizes.channels, sizes.kernel - 1)
        matrices = (slots, sizes.value_heads, sizes.key_dim, sizes.value_dim)
        self.inputs = [like.new_zeros(inputs, dtype=torch.float32) for _ in range(sizes.layers)]
        self.matrices = [like.new_zeros(matrices, dtype=torch.float32) for _ in range(sizes.layers)]

    def batch(self, packed: Packed) -> StateBatch:
        """For the chunks of a step. Those of a step that only measures have no slots: from ZERO to PADDING."""
        uses = packed.states or (StateUse(ZERO, PADDING),) * len(packed.contexts)
        decodes = packed.num_decodes
        views: list[ChunkStates] = []
        at = decodes
        for context, use in zip(packed.contexts[decodes:], uses[decodes:], strict=True):
            views.append(ChunkStates(at, at + context.tokens, use))
            at += context.tokens
        read = self._slots([use.read for use in uses[:decodes]])
        write = self._slots([use.write for use in uses[:decodes]])
        return StateBatch(self, read, write, tuple(views))

    def decode_batch(self, read: Tensor, write: Tensor) -> StateBatch:
        """For one new token of each sequence. read, write: int64 [R], on the device and never read by the host."""
        return StateBatch(self, read, write, ())

    def _slots(self, slots: Sequence[int]) -> Tensor:
        return to_device(np.array(slots, np.int64), self.matrices[0].device)


@dataclass(frozen=True, slots=True)
class ChunkStates:
    """A chunk of more than one token: rows [first_row, end_row) of the packed batch."""

    first_row: int
    end_row: int
    use: StateUse


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The slots of one packed forward. read, write: int64 [R], of the rows that decode, which come first."""

    cache: StateCache
    read: Tensor
    write: Tensor
    chunks: tuple[ChunkStates, ...]

    def advance(self, layer: int, inputs: Tensor, beta: Tensor, decay: Tensor, taps: Tensor) -> Tensor:
        """Reads the state of every sequence, takes its new tokens, and writes what becomes of it.

        layer: its number among those with states. inputs: [T, channels], queries, keys and values before the
        convolution. beta, decay: [T, value_heads], the latter in log space. taps: [channels, kernel], its weights.
        Returns [T, value_heads, value_dim] in the dtype of inputs.
        """
        sizes = self.cache.sizes
        out = inputs.new_empty((len(inputs), sizes.value_heads, sizes.value_dim))
        if rows := len(self.read):
            own = inputs[:rows], beta[:rows], decay[:rows]
            out[:rows] = self._decode(layer, *own, taps)
        for chunk in self.chunks:
            rows_of = slice(chunk.first_row, chunk.end_row)
            out[rows_of] = self._chunk(layer, chunk.use, inputs[rows_of], beta[rows_of], decay[rows_of], taps)
        return out

    def _decode(self, layer: int, inputs: Tensor, beta: Tensor, decay: Tensor, taps: Tensor) -> Tensor:
        windows, matrices = self.cache.inputs[layer], self.cache.matrices[layer]
        window = torch.cat([windows[self.read], inputs[:, :, None].float()], dim=2)  # [R, channels, kernel]
        windows.index_copy_(0, self.write, window[:, :, 1:])
        convolved = F.silu((window.to(taps.dtype) * taps).sum(2))
        out, state = self.cache.kernels.step(
            *self._heads(convolved[:, None]),
            g=decay[:, None],
            beta=beta[:, None],
            initial_state=matrices[self.read],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        matrices.index_copy_(0, self.write, state)
        found: Tensor = out[:, 0]
        return found

    def _chunk(self, layer: int, use: StateUse, inputs: Tensor, beta: Tensor, decay: Tensor, taps: Tensor) -> Tensor:
        windows, matrices = self.cache.inputs[layer], self.cache.matrices[layer]
        before = windows[use.read]
        window = torch.cat([before, inputs.T.float()], dim=1)  # [channels, kernel − 1 + tokens]
        convolved = F.silu(F.conv1d(window[None].to(taps.dtype), taps[:, None], groups=len(taps)))
        heads = self._heads(convolved.transpose(1, 2))
        state, parts, start = matrices[use.read][None], [], 0
        for end, slot in (*use.saves, (len(inputs), use.write)):
            if end > start:
                rows = slice(start, end)
                out, state = self.cache.kernels.chunk(
                    *(each[:, rows] for each in heads),
                    g=decay[None, rows],
                    beta=beta[None, rows],
                    initial_state=state,
                    output_final_state=True,
                    use_qk_l2norm_in_kernel=True,
                )
                parts.append(out[0])
            windows[slot] = window[:, end : end + before.shape[1]]
            matrices[slot] = state[0]
            start = end
        return torch.cat(parts)

    def _heads(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of [B, L, channels]: [B, L, heads, head_dim] each."""
        sizes = self.cache.sizes
        keys = sizes.key_heads * sizes.key_dim
        query, key, value = convolved.split([keys, keys, sizes.value_heads * sizes.value_dim], dim=-1)
        return (
            query.unflatten(-1, (sizes.key_heads, sizes.key_dim)),
            key.unflatten(-1, (sizes.key_heads, sizes.key_dim)),
            value.unflatten(-1, (sizes.value_heads, sizes.value_dim)),
        )
