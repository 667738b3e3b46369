"""CUDA graphs of a head that drafts: captured at startup, one for each number of sequences, and replayed for each token
that is drafted after the first.

    of each sequence:  [ t h w | tokens | block block … ]   int32, copied to the device before the first replay
                         token id, output of the head       from one replay to the next they stay on the device

A replay drafts the next token of every sequence, and makes its rows those of the token after it, so the host reads none
of them in between. This module does not know CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from gridsieve.services.compute.graphs import Capture, doubling
from gridsieve.services.compute.transfers import to_device
from gridsieve.services.generation.model.attention.cache import CapturedCache
from gridsieve.services.generation.model.draft_head import DraftHead
from gridsieve.services.generation.request.batch import Context, Int64Array

# Columns of a row: positions, length of the sequence in tokens, and from FIRST_BLOCK on its block table.
POSITIONS, TOKENS, FIRST_BLOCK = slice(3), 3, 4


class DraftGraphs:
    """Graphs of a head over its cache, for up to `max_sequences` of up to `max_blocks` each."""

    def __init__(
        self,
        head: DraftHead,
        embed: nn.Module,
        cache: CapturedCache,
        like: Tensor,
        max_sequences: int,
        max_blocks: int,
        capture: Capture,
    ) -> None:
        """like: hidden states, [.., D]. Captures the largest first. Raises RuntimeError as `capture`."""
        self._max_blocks = max_blocks
        self._sizes = doubling(1, max_sequences)
        self._graphs = {
            rows: _Graph(head, embed, cache, like.new_zeros(rows, like.shape[-1]), max_blocks, capture)
            for rows in reversed(self._sizes)
        }

    def draft(
        self, ids: Tensor, rows: Tensor, positions: Int64Array, contexts: Sequence[Context], count: int
    ) -> list[Tensor] | None:
        """The `count` tokens after `ids`, int64 [R] each; None if no graph fits.

        ids: int64 [R]. rows: [R, D], the head's outputs from which they were drafted. positions: int64 [R], and
        contexts: of the rows that read `ids`.
        """
        size = next((each for each in self._sizes if each >= len(ids)), None)
        if size is None or max(len(each.blocks) for each in contexts) > self._max_blocks:
            return None
        return self._graphs[size].draft(ids, rows, positions, contexts, count)


class _Graph:
    """Of as many sequences as `hidden`, [R, D], has rows."""

    def __init__(
        self, head: DraftHead, embed: nn.Module, cache: CapturedCache, hidden: Tensor, blocks: int, capture: Capture
    ) -> None:
        self._head, self._embed, self._cache, self._hidden = head, embed, cache, hidden
        self._padding = Context(0, 1, (cache.sizes.padding_block,))
        self._ids = hidden.new_zeros(len(hidden), dtype=torch.int64)
        self._inputs = hidden.new_zeros((len(hidden), FIRST_BLOCK + blocks), dtype=torch.int32)
        self._fill(np.empty(0, np.int64), [])
        self._plan([])
        self._captured = capture([self._inputs], self._advance)

    def draft(
        self, ids: Tensor, rows: Tensor, positions: Int64Array, contexts: Sequence[Context], count: int
    ) -> list[Tensor]:
        self._fill(positions, contexts)
        self._ids[: len(ids)], self._hidden[: len(ids)] = ids, rows
        drafted = []
        for number in range(count):
            self._plan([Context(each.start + number, each.end + number, each.blocks) for each in contexts])
            self._captured.replay()
            drafted.append(self._ids[: len(ids)].clone())
        return drafted

    def _fill(self, positions: Int64Array, contexts: Sequence[Context]) -> None:
        """Rows beyond those of `contexts` hold a sequence of one token in the cache's padding block."""
        rows, filled = np.zeros(self._inputs.shape, np.int32), len(contexts)
        rows[:, TOKENS], rows[:, FIRST_BLOCK:] = 1, self._cache.sizes.padding_block
        rows[:filled, POSITIONS] = positions[:, None]
        for row, context in zip(rows, contexts, strict=False):
            row[TOKENS] = context.end
            row[FIRST_BLOCK : FIRST_BLOCK + len(context.blocks)] = context.blocks
        self._inputs.copy_(to_device(rows, self._inputs.device))

    def _plan(self, contexts: Sequence[Context]) -> None:
        padding = [self._padding] * (len(self._inputs) - len(contexts))
        self._cache.plan_decode([*contexts, *padding], self._inputs.shape[1] - FIRST_BLOCK)

    def _advance(self) -> Tensor:
        positions = self._inputs[:, POSITIONS].long().T
        batch = self._cache.decode_batch(
            self._inputs[:, FIRST_BLOCK:].contiguous(), self._inputs[:, TOKENS].contiguous()
        )
        rows = self._head(self._embed(self._ids), self._hidden, self._head.turns(positions), batch)
        self._ids.copy_(self._head.draft(rows))
        self._inputs[:, :FIRST_BLOCK] += 1
        return self._hidden.copy_(rows)
