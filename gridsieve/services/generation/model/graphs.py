"""CUDA graphs of decode steps: captured at startup, one for each number of rows, replayed for steps of decodes alone.

    of each row:  [ id | t h w | tokens | states | block block … ]   int32, copied to the device in one piece
    rows beyond those of a step hold a sequence of one token in the cache's padding block

Each row is a sequence of its own, which ends with it, so draft tokens need no other graph: the keys and values of all
rows are written before any row attends.

These rows are the only input of a replay, beside what the cache plans on the host: slots to write, contexts and
positions follow from them. All graphs write their logits into one buffer. Only caches whose attention reads blocks in
place are captured. This module does not know CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle, repeat

import torch
from torch import Tensor

from gridsieve.services.compute.graphs import Capture, doubling
from gridsieve.services.compute.transfers import pinned_for
from gridsieve.services.generation.model.attention.cache import CapturedCache
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.states import PADDING, ZERO, StateCache
from gridsieve.services.generation.request.batch import Context, Packed

# Columns of a row: token id, positions, length of the sequence in tokens, slots of the recurrent states that it reads
# and writes, and from FIRST_BLOCK on its block table.
ID, POSITIONS, TOKENS, STATES, FIRST_BLOCK = 0, slice(1, 4), 4, slice(5, 7), 7


class DecodeGraphs:
    """Graphs of steps in which every row is sampled."""

    def __init__(
        self,
        model: LanguageModel,
        cache: CapturedCache,
        states: StateCache | None,
        max_rows: int,
        max_blocks: int,
        capture: Capture,
    ) -> None:
        """Captures the largest first: smaller graphs reuse its memory. Raises RuntimeError as `capture`."""
        self._max_blocks = max_blocks
        self._sizes = doubling(1, max_rows)
        # For 1280 rows of 152 k tokens 0.8 GB; with a buffer for each size, the graphs would take 2 GB.
        logits = torch.empty((max_rows, model.vocab_size), dtype=torch.float32, device=model.device)
        hidden = None
        if model.draft:
            hidden = torch.empty((max_rows, model.hidden_size), dtype=model.dtype, device=model.device)
        self._graphs = {
            rows: _Graph(model, cache, states, max_blocks, _Output(logits, hidden).first(rows), capture)
            for rows in reversed(self._sizes)
        }

    def __len__(self) -> int:
        return len(self._sizes)

    def replay(self, decodes: Packed, ids: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Raw logits of every row, float32 [R, vocab_size], and what the head that drafts reads, [R, D]; None if no
        graph fits. Valid until the next replay.

        decodes: `decodes_only`. ids: int64 [R], theirs, on the device.
        """
        rows = next((each for each in self._sizes if each >= len(ids)), None)
        if rows is None or max(len(context.blocks) for context in decodes.contexts) > self._max_blocks:
            return None
        output = self._graphs[rows].replay(decodes, ids).first(len(ids))
        return output.logits, output.hidden


@dataclass(frozen=True, slots=True)
class _Output:
    """logits: float32 [rows, vocab_size]. hidden: [rows, D], what the head that drafts reads; None without a head."""

    logits: Tensor
    hidden: Tensor | None

    def first(self, rows: int) -> _Output:
        return _Output(self.logits[:rows], None if self.hidden is None else self.hidden[:rows])


class _Graph:
    """The graph of a number of rows, those of `output`.

    Its input, int32 [rows, FIRST_BLOCK + blocks], is filled in pinned host memory and copied asynchronously. There are
    two copies of it, because a step is launched before the one before it was read.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: CapturedCache,
        states: StateCache | None,
        blocks: int,
        output: _Output,
        capture: Capture,
    ) -> None:
        self._hidden, logits = output.hidden, output.logits
        self._cache, self._max_blocks = cache, blocks
        self._padding = Context(0, 1, (cache.sizes.padding_block,))
        host = torch.zeros((len(logits), FIRST_BLOCK + blocks), dtype=torch.int32)
        host[:, TOKENS], host[:, FIRST_BLOCK:] = 1, cache.sizes.padding_block
        host[:, STATES] = torch.tensor([ZERO, PADDING])
        self._hosts = cycle([pinned_for(host.clone(), model.device) for _ in range(2)])
        self.inputs = host.to(model.device, copy=True)
        self._plan([])
        self._captured = capture([self.inputs], partial(_decode, model, cache, states, self.inputs, output))

    def replay(self, decodes: Packed, ids: Tensor) -> _Output:
        contexts = decodes.row_contexts
        host, filled = next(self._hosts), len(contexts)
        rows = host.numpy()
        rows[:filled, POSITIONS] = decodes.positions.T
        rows[:filled, TOKENS] = [context.end for context in contexts]
        for row, context in enumerate(contexts):
            rows[row, FIRST_BLOCK : FIRST_BLOCK + len(context.blocks)] = context.blocks
        if decodes.states:
            rows[:filled, STATES] = [(use.read, use.write) for use in decodes.states]
        rows[filled:, :TOKENS], rows[filled:, TOKENS], rows[filled:, FIRST_BLOCK] = 0, 1, self._padding.blocks[0]
        rows[filled:, STATES] = ZERO, PADDING
        self._plan(contexts)
        self.inputs.copy_(host, non_blocking=True)
        self.inputs[:filled, ID] = ids
        self._captured.replay()
        return _Output(self._captured.output, self._hidden)

    def _plan(self, contexts: Sequence[Context]) -> None:
        padded = chain(contexts, repeat(self._padding, len(self.inputs) - len(contexts)))
        self._cache.plan_decode(list(padded), self._max_blocks)


def _decode(
    model: LanguageModel, cache: CapturedCache, states: StateCache | None, inputs: Tensor, output: _Output
) -> Tensor:
    """Raw next-token logits, written into `output`. inputs: int32 [R, FIRST_BLOCK + W]."""
    embeds: Tensor = model.embed_tokens(inputs[:, ID])
    last = model.text(
        inputs_embeds=embeds[None],  # [1, R, D]
        position_ids=model.position_ids(inputs[:, POSITIONS].long().T),
        use_cache=False,
        **({"states": states.decode_batch(*inputs[:, STATES].long().T)} if states else {}),
        batch=cache.decode_batch(inputs[:, FIRST_BLOCK:].contiguous(), inputs[:, TOKENS].contiguous()),
    ).last_hidden_state[0]
    if output.hidden is not None and model.draft:
        output.hidden.copy_(model.draft.hidden())
    return output.logits.copy_(model.lm_head(last))
