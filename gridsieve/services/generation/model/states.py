"""The recurrent states of layers that keep one per sequence instead of keys and values: slots, written once each.

    chunk [start, end) of a sequence     reads the slot of the state after `start` tokens, writes another one
    snapshots within the chunk           further slots, each with the state after some of its tokens
    chunks of as many tokens             one batch: rows that decode, and rows with as many drafts

    in a captured step               parts of chunks, each of which ends where a state is written: `PartTable`

Nothing is written to a slot that a chunk begins with, so a step that failed can be computed again from the same
states. Slot ZERO is the state before the first token and never written; slot PADDING is written by rows that only fill
a batch.

A state is float32: the last inputs of a causal convolution, and a matrix for each head. How a token changes the
matrices is the model's `Recurrence`: gated delta networks or Mamba2. Matrices are gathered from their slots, advanced
and scattered; of few tokens, on CUDA with Triton, a kernel advances them from slot to slot (`state_kernels.py`).
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

from gridsieve.common.contract.plan import Int32Array
from gridsieve.services.compute.transfers import to_device
from gridsieve.services.generation.memory.state_slots import NO_STATE
from gridsieve.services.generation.request.batch import Packed, StateUse

ZERO, PADDING = NO_STATE, 1
# Slots that hold no sequence's state: those two.
RESERVED = 2
# Of a chunk of a captured step: as many as its drafts, the tokens before them and the end of a block divide it into.
PARTS = 3
# Kernels for chunks compute 64 tokens or more at a time: so few, drafts for instance, are computed one by one.
FEW_TOKENS = 8
_BYTES = 4
# Matrices of a layer that a CPU advances together: so many stay in the cache of a core from one operator to the next.
CPU_BYTES = 2**20


class Recurrence(Protocol):
    """How tokens change the matrices of a layer.

    gates: [.., heads] each, float32 or the model's dtype, of the same tokens. weights: of the layer.
    """

    @property
    def matrices(self) -> tuple[int, int, int]:
        """Of one state: heads, and the rows and columns of each head's matrix."""

    def fastest(self, like: Tensor) -> Recurrence:
        """The same with the fastest functions that work on the device and in the dtype of `like`."""

    def advance(
        self, convolved: Tensor, gates: Sequence[Tensor], weights: Sequence[Tensor], matrices: Tensor
    ) -> tuple[Tensor, Tensor]:
        """L tokens of each of R sequences. convolved: [R, L, channels]. matrices: [R, heads, rows, columns], before
        them; they may be changed.

        Returns the output [R, L, heads, head_dim], and the matrices after them.
        """

    def advance_slots(
        self,
        convolved: Tensor,
        gates: Sequence[Tensor],
        weights: Sequence[Tensor],
        matrices: Tensor,
        ends: Sequence[int],
        slots: Sequence[Tensor],
    ) -> Tensor | None:
        """As `advance`, with the matrices of all slots. ends, slots: see `Alike`.

        Returns the output; None, and changes nothing, if it has no kernel for that.
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

    def of(self, window: Tensor) -> Tensor:
        """window: [R, channels, kernel − 1 + L], any float dtype. Returns [R, L, channels] in the dtype of the taps."""
        window, kernel = window.to(self.taps.dtype), self.taps.shape[1]
        if window.shape[2] - kernel < FEW_TOKENS:
            sums = (window.unfold(2, kernel, 1) * self.taps[:, None]).sum(3)
            sums = sums if self.bias is None else sums + self.bias[:, None]
        else:
            sums = F.conv1d(window, self.taps[:, None], self.bias, groups=len(self.taps))
        return F.silu(sums).mT


class StateCache:
    """The slots of every layer: inputs of the convolution, and matrices, float32."""

    def __init__(self, sizes: StateSizes, slots: int, like: Tensor) -> None:
        """slots: their number, the reserved ones included. like: of the model's device."""
        self.sizes = sizes
        self.recurrence = sizes.recurrence.fastest(like)
        inputs, matrices = (slots, sizes.channels, sizes.kernel - 1), (slots, *sizes.recurrence.matrices)
        self.inputs = [like.new_zeros(inputs, dtype=torch.float32) for _ in range(sizes.layers)]
        self.matrices = [like.new_zeros(matrices, dtype=torch.float32) for _ in range(sizes.layers)]
        fitting = max(1, CPU_BYTES // (_BYTES * math.prod(matrices[1:])))
        self._together = fitting if like.device.type == "cpu" else None  # sequences

    def batch(self, packed: Packed) -> StateBatch:
        """For the chunks of a step. Those of a step that only measures have no slots: from ZERO to PADDING."""
        uses = packed.states or (StateUse(ZERO, PADDING),) * len(packed.contexts)
        alike: dict[tuple[int, ...], list[tuple[int, StateUse]]] = {}
        at = 0
        for context, use in zip(packed.contexts, uses, strict=True):
            ends = (*(tokens for tokens, _ in use.saves), context.tokens)
            alike.setdefault(ends, []).append((at, use))
            at += context.tokens
        parts = [
            self._alike(ends, chunks[first : first + (self._together or len(chunks))])
            for ends, chunks in alike.items()
            for first in range(0, len(chunks), self._together or len(chunks))
        ]
        return StateBatch(self, tuple(parts))

    def decode_batch(self, read: Tensor, write: Tensor) -> StateBatch:
        """For one new token of each sequence. read, write: int64 [R], on the device and never read by the host."""
        return StateBatch(self, (Alike(slice(len(read)), (1,), (read, write)),))

    def parts_batch(self, table: Tensor) -> StateBatch:
        """Of a `PartTable`, int64 [parts, S, FIRST_ROW + L], on the device and never read by the host."""
        return StateBatch(
            self, tuple(Part(each[:, FIRST_ROW:], each[:, TOKENS], (each[:, READ], each[:, WRITE])) for each in table)
        )

    def _alike(self, ends: tuple[int, ...], chunks: Sequence[tuple[int, StateUse]]) -> Alike:
        """chunks: the first row of each, and its slots."""
        device = self.matrices[0].device
        rows = np.add.outer([at for at, _ in chunks], np.arange(ends[-1])).reshape(-1)
        first, end = int(rows[0]), int(rows[-1]) + 1
        slots = [(use.read, *(slot for _, slot in use.saves), use.write) for _, use in chunks]
        return Alike(
            slice(first, end) if end - first == len(rows) else to_device(rows, device),
            ends,
            tuple(to_device(np.array(slots, np.int64).T, device)),
        )


@dataclass(frozen=True, slots=True)
class Alike:
    """Chunks with equal numbers of tokens, whose states are written after the same tokens.

    rows: of these chunks in the packed batch, chunk after chunk; a tensor is int64, on the device. ends: numbers of
    tokens after which a state is written; the last is all. slots: int64 [R] each: slots that are read, then for each
    end the slots that are written.
    """

    rows: slice | Tensor
    ends: tuple[int, ...]
    slots: tuple[Tensor, ...]

    def take(self, packed: Tensor) -> Tensor:
        """Their rows of [T, ..]: [R, L, ..]."""
        rows: Tensor = packed[self.rows].unflatten(0, (-1, self.ends[-1]))
        return rows

    def put(self, computed: Tensor, out: Tensor) -> None:
        """Writes [R, L, ..] to their rows of [T, ..]."""
        out[self.rows] = computed.flatten(0, 1).to(out.dtype)

    def inputs_before(self, end: int, window: Tensor, count: int) -> Tensor:
        """The last inputs before a token of theirs. window: [R, channels, count + L]; returns [R, channels, count]."""
        return window[:, :, end : end + count]


# Columns of a `PartTable`: number of tokens, slots that are read and written, and from FIRST_ROW on the packed rows.
TOKENS, READ, WRITE, FIRST_ROW = 0, 1, 2, 3


class PartTable:
    """The parts of the chunks of a captured step, int32 [PARTS, sequences, FIRST_ROW + most_tokens].

        chunk    [ a a | d d d ]        two accepted tokens, three drafts
        parts    [a a ·] [d d d] [· · ·]     the state after the first is read again by the second; the third is empty

    Part after part is computed, all sequences of a part together. A row that is none has the number `rows`, after the
    last one, and changes no state.
    """

    def __init__(self, sequences: int, most_rows: int, rows: int) -> None:
        """most_rows: of a chunk, whose parts have half of them at most, rounded up. rows: of the packed batch."""
        self._sequences, self._most_tokens, self._rows = sequences, -(-most_rows // 2), rows

    def empty(self) -> Tensor:
        """Without chunks: from ZERO to PADDING."""
        table = torch.empty(PARTS, self._sequences, FIRST_ROW + self._most_tokens, dtype=torch.int32)
        _clear(table.numpy(), self._rows)
        return table

    def fill(self, table: Int32Array, packed: Packed) -> bool:
        """Fills a table with the chunks of a step. Returns False if they do not fit into the parts."""
        _clear(table, self._rows)
        at = 0
        for number, (context, use) in enumerate(zip(packed.contexts, packed.states, strict=True)):
            read, start = use.read, 0
            ends = (*use.saves, (context.tokens, use.write))
            if len(ends) > PARTS:
                return False
            for part, (end, write) in zip(table[:, number], ends, strict=False):
                if end - start > self._most_tokens:
                    return False
                part[:FIRST_ROW] = end - start, read, write
                part[FIRST_ROW : FIRST_ROW + end - start] = np.arange(at + start, at + end)
                read, start = write, end
            at += context.tokens
        return True


def _clear(table: Int32Array, rows: int) -> None:
    table[..., :FIRST_ROW], table[..., FIRST_ROW:] = (0, ZERO, PADDING), rows


@dataclass(frozen=True, slots=True)
class Part:
    """A part of each of S chunks, of up to L tokens.

    rows: int64 [S, L], of the packed batch; the number of its rows stands for none. tokens: int64 [S]. slots: int64
    [S], that are read and written.
    """

    rows: Tensor
    tokens: Tensor
    slots: tuple[Tensor, Tensor]

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.rows.shape[1],)

    def take(self, packed: Tensor) -> Tensor:
        """[T, ..] to [S, L, ..]. What is none is zero: gates of zero leave the matrices of both recurrences as they
        are."""
        return F.pad(packed, (0, 0, 0, 1))[self.rows]

    def put(self, computed: Tensor, out: Tensor) -> None:
        """Writes [S, L, ..] to rows of [T + 1, ..], of which the last has no meaning."""
        out[self.rows] = computed.to(out.dtype)

    def inputs_before(self, end: int, window: Tensor, count: int) -> Tensor:
        """As of `Alike`, before the end of each sequence's part."""
        columns = self.tokens[:, None] + torch.arange(count, device=window.device)
        return window.gather(2, columns[:, None].expand(-1, window.shape[1], -1))


@dataclass(frozen=True, slots=True)
class StateBatch:
    """The slots of one packed forward."""

    cache: StateCache
    chunks: tuple[Alike, ...] | tuple[Part, ...]

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
        out = inputs.new_zeros((len(inputs) + 1, self.cache.sizes.recurrence.matrices[0], head_dim))
        for each in self.chunks:
            own, *own_gates = (each.take(packed) for packed in (inputs, *gates))
            each.put(self._advance(layer, each, own, convolution, own_gates, weights), out)
        return out[:-1]

    def _advance(
        self,
        layer: int,
        chunks: Alike | Part,
        inputs: Tensor,
        convolution: Convolution,
        gates: Sequence[Tensor],
        weights: Sequence[Tensor],
    ) -> Tensor:
        """inputs: [R, L, channels]. gates: [R, L, heads] each. Returns [R, L, heads, head_dim]."""
        windows, matrices = self.cache.inputs[layer], self.cache.matrices[layer]
        read, *written = chunks.slots
        window = torch.cat([windows[read], inputs.mT.float()], dim=2)  # [R, channels, kernel − 1 + L]
        convolved, recurrence = convolution.of(window), self.cache.recurrence
        for end, slots in zip(chunks.ends, written, strict=True):
            windows.index_copy_(0, slots, chunks.inputs_before(end, window, windows.shape[2]))
        if chunks.ends[-1] <= FEW_TOKENS:
            out = recurrence.advance_slots(convolved, gates, weights, matrices, chunks.ends, chunks.slots)
            if out is not None:
                return out
        state, outs, start = matrices[read], list[Tensor](), 0
        for end, slots in zip(chunks.ends, written, strict=True):
            if end > start:
                own = [gate[:, start:end] for gate in gates]
                out, state = recurrence.advance(convolved[:, start:end], own, weights, state)
                outs.append(out)
            matrices.index_copy_(0, slots, state)
            start = end
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
