"""Recurrent states that are the same to the last bit wherever chunks begin and whatever is computed with them.

A kernel for chunks adds up the tokens of a chunk in an order of its own. So each token is computed by itself, from the
state that the one before it left, in a prompt as in an answer. Convolutions are computed for all rows of a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gridsieve.services.generation.model.states import PADDING, ZERO, Alike, Convolution, StateBatch, StateCache
from gridsieve.services.generation.request.batch import Packed, StateUse


class FixedStateCache(StateCache):
    def batch(self, packed: Packed) -> StateBatch:
        uses = packed.states or (StateUse(ZERO, PADDING),) * len(packed.contexts)
        parts, at = list[Alike](), 0
        for context, use in zip(packed.contexts, uses, strict=True):
            ends = (*(tokens for tokens, _ in use.saves), context.tokens)
            parts.append(self._alike(ends, [(at, use)]))
            at += context.tokens
        return FixedStateBatch(self, tuple(parts))


@dataclass(frozen=True, slots=True)
class FixedStateBatch(StateBatch):
    """chunks: of one sequence each. Rows in none of them are zeros."""

    chunks: tuple[Alike, ...]

    def advance(
        self,
        layer: int,
        inputs: Tensor,
        convolution: Convolution,
        gates: Sequence[Tensor],
        weights: Sequence[Tensor],
        head_dim: int,
    ) -> Tensor:
        """See `StateBatch.advance`."""
        cache, sizes = self.cache, self.cache.sizes
        windows, matrices = cache.inputs[layer], cache.matrices[layer]
        seen = windows.new_zeros(len(inputs), sizes.channels, sizes.kernel)  # by each row
        before = list[Tensor]()
        for each in self.chunks:
            window = torch.cat([windows[each.slots[0]], inputs[each.rows].T.float()[None]], dim=2)
            seen[each.rows] = window[0].unfold(1, sizes.kernel, 1).transpose(0, 1)
            before.append(window)
        convolved = convolution.of(seen)  # [T, 1, channels]
        out = inputs.new_zeros((len(inputs), sizes.recurrence.matrices[0], head_dim))
        for each, window in zip(self.chunks, before, strict=True):
            assert isinstance(each.rows, slice)
            state, start = matrices[each.slots[0]], 0
            for end, slots in zip(each.ends, each.slots[1:], strict=True):
                for row in range(each.rows.start + start, each.rows.start + end):
                    own = [gate[row][None, None] for gate in gates]
                    token, state = cache.recurrence.advance(convolved[row][None], own, weights, state)
                    out[row] = token[0, 0].to(out.dtype)
                windows.index_copy_(0, slots, window[:, :, end : end + windows.shape[2]])
                matrices.index_copy_(0, slots, state)
                start = end
        return out
