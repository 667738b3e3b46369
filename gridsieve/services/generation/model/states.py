"""The recurrent states of layers that keep one per sequence instead of keys and values: slots, written once each.

    chunk [start, end) of a sequence     reads the slot of the state after `start` tokens, writes another one
    snapshots within the chunk           further slots, each with the state after some of its tokens
    a row that decodes                   a step of its own; all such rows are one batch

Nothing is written to a slot that is read, so a step that failed can be computed again from the same states. Slot ZERO
is the state before the first token and never written; slot PADDING is written by rows that only fill a batch.

A state is float32: the last inputs of a causal convolution, and a matrix for each head. How a token changes the
matrices is the model's `Recurrence`: gated delta networks or Mamba2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gridsieve.services.compute.transfers import to_device
from gridsieve.services.generation.memory.state_slots import NO_STATE
from gridsieve.services.generation.request.batch import Packed, StateUse

ZERO, PADDING = NO_STATE, 1
# Slots that hold no sequence's state: those two.
RESERVED = 2
_BYTES = 4


class Recurrence(Protocol):
    """How tokens change the matrices of a layer.

    gates: [.., heads] each, float32 or the model's dtype, of the same tokens. weights: of the layer.
    """

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Of one state: heads, and the rows and columns of each head's matrix."""

    def fastest(self, like: Tensor) -> Recurrence:
        """The same with the fastest functions that work on the device and in the dtype of `like`."""

    def step(
        self, convolved: Tensor, gates: Sequence[Tensor], weights: Sequence[Tensor], matrices: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One token of each of R sequences. convolved: [R, channels]. matrices: [R, heads, rows, columns], before it;
        they may be changed.

        Returns the output [R, heads, head_dim], and the matrices after it.
        """

    def chunk(
        self, convolved: Tensor, gates: Sequence[Tensor], weights: Sequence[Tensor], matrix: Tensor
    ) -> tuple[Tensor, Tensor]:
        """L tokens of one sequence. convolved: [L, channels]. matrix: [heads, rows, columns], before them.

        Returns the output [L, heads, head_dim], and the matrix after them.
        """


@dataclass(frozen=True, slots=True)
class StateSizes:
    """Of one state. layers: that keep one. channels: of the convolution, whose kernel has `kernel` taps."""

    layers: int
    channels: int
    kernel: int
    recurrence: Recurrence

    @property
    def bytes(self) -> int:
        """Of one slot, in all layers."""
        return _BYTES * self.layers * (self.channels * (self.kernel - 1) + math.prod(self.recurrence.matrices))


@dataclass(frozen=True, slots=True)
class Convolution:
    """The causal convolution of a layer, a kernel for each channel, followed by silu.

    taps: [channels, kernel]. bias: [channels], or None.
    """

    taps: Tensor
    bias: Tensor | None = None


class StateCache:
    """The slots of every layer: inputs of the convolution, and matrices, float32."""

    def __init__(self, sizes: StateSizes, slots: int, like: Tensor) -> None:
        """slots: their number, the reserved ones included. like: of the model's device."""
        self.sizes = sizes
        self.recurrence = sizes.recurrence.fastest(like)
        inputs, matrices = (slots, sizes.channels, sizes.kernel - 1), (slots, *sizes.recurrence.matrices)
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

    def advance(
        self,
        layer: int,
        inputs: Tensor,
        convolution: Convolution,
        gates: Sequence[Tensor],
        weights: Sequence[Tensor],
        head_dim: int,
    ) -> Tensor:
        """Reads the state of every sequence, takes its new tokens, and writes what becomes of it.

        layer: its number among those with states. inputs: [T, channels], before the convolution. gates: [T, heads]
        each, and weights: as the model's recurrence takes them. head_dim: of the output.
        Returns [T, heads, head_dim] in the dtype of inputs.
        """
        out = inputs.new_empty((len(inputs), self.cache.sizes.recurrence.matrices[0], head_dim))
        if rows := len(self.read):
            own = [gate[:rows] for gate in gates]
            out[:rows] = self._decode(layer, inputs[:rows], convolution, own, weights)
        for chunk in self.chunks:
            rows_of = slice(chunk.first_row, chunk.end_row)
            own = [gate[rows_of] for gate in gates]
            self._chunk(layer, chunk.use, inputs[rows_of], convolution, own, weights, out[rows_of])
        return out

    def _decode(
        self, layer: int, inputs: Tensor, convolution: Convolution, gates: Sequence[Tensor], weights: Sequence[Tensor]
    ) -> Tensor:
        windows, matrices = self.cache.inputs[layer], self.cache.matrices[layer]
        window = torch.cat([windows[self.read], inputs[:, :, None].float()], dim=2)  # [R, channels, kernel]
        windows.index_copy_(0, self.write, window[:, :, 1:])
        taps = convolution.taps
        convolved = (window.to(taps.dtype) * taps).sum(2)
        if convolution.bias is not None:
            convolved = convolved + convolution.bias
        out, state = self.cache.recurrence.step(F.silu(convolved), gates, weights, matrices[self.read])
        matrices.index_copy_(0, self.write, state)
        return out

    def _chunk(
        self,
        layer: int,
        use: StateUse,
        inputs: Tensor,
        convolution: Convolution,
        gates: Sequence[Tensor],
        weights: Sequence[Tensor],
        out: Tensor,
    ) -> None:
        windows, matrices = self.cache.inputs[layer], self.cache.matrices[layer]
        before, taps = windows[use.read], convolution.taps
        window = torch.cat([before, inputs.T.float()], dim=1)  # [channels, kernel − 1 + tokens]
        sums = F.conv1d(window[None].to(taps.dtype), taps[:, None], convolution.bias, groups=len(taps))
        convolved, matrix, start = F.silu(sums)[0].T, matrices[use.read], 0
        for end, slot in (*use.saves, (len(inputs), use.write)):
            if end > start:
                rows = slice(start, end)
                own = [gate[rows] for gate in gates]
                out[rows], matrix = self.cache.recurrence.chunk(convolved[rows], own, weights, matrix)
            windows[slot] = window[:, end : end + before.shape[1]]
            matrices[slot] = matrix
            start = end
