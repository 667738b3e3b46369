"""CUDA graphs of decode steps: captured at startup, one for each number of rows, replayed for steps of decodes alone.

    of each row:  [ id | t h w | tokens | block block block … ]      int32, copied to the device in one piece
    rows beyond those of a step hold a sequence of one token in the cache's padding block

Each row is a sequence of its own, which ends with it, so draft tokens need no other graph: the keys and values of all
rows are written before any row attends.

These rows are the only input of a replay, beside what the cache plans on the host: slots to write, contexts and
positions follow from them. Only caches whose attention reads blocks in place are captured. `DecodeGraphs` itself is
independent of CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain, cycle, repeat

import torch
from torch import Tensor

from framesieve.services.compute.graphs import Capture, doubling
from framesieve.services.generation.model.attention.cache import CapturedCache
from framesieve.services.generation.model.language_model import LanguageModel
from framesieve.services.generation.request.batch import Context, Packed

# Columns of a row: token id, positions, length of the sequence in tokens, and from FIRST_BLOCK on its block table.
ID, POSITIONS, TOKENS, FIRST_BLOCK = 0, slice(1, 4), 4, 5


class DecodeGraphs:
    """Graphs of steps in which every row is sampled."""

    def __init__(
        self, model: LanguageModel, cache: CapturedCache, most_rows: int, most_blocks: int, capture: Capture
    ) -> None:
        """Captures the largest first: smaller graphs reuse its memory. Raises RuntimeError as `capture`."""
        self._most_blocks = most_blocks
        sizes = doubling(1, most_rows)
        self._graphs = {rows: _Graph(model, cache, rows, most_blocks, capture) for rows in reversed(sizes)}
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def replay(self, decodes: Packed, ids: Tensor) -> Tensor | None:
        """Raw logits of every row, float32 [R, vocab_size], valid until the next replay; None if no graph fits.

        decodes: `decodes_only`. ids: int64 [R], theirs, on the device.
        """
        rows = next((each for each in self._sizes if each >= len(ids)), None)
        if rows is None or max(len(context.blocks) for context in decodes.contexts) > self._most_blocks:
            return None
        return self._graphs[rows].replay(decodes, ids)[: len(ids)]


class _Graph:
    """The graph of a number of rows.

    Its rows, int32 [rows, FIRST_BLOCK + blocks], are filled in pinned host memory and copied asynchronously. There are
    two copies of them, because a step is launched before the one before it was read.
    """

    def __init__(self, model: LanguageModel, cache: CapturedCache, rows: int, blocks: int, capture: Capture) -> None:
        on_cuda = model.device.type == "cuda"
        self._cache, self._most_blocks = cache, blocks
        self._padding = Context(0, 1, (cache.sizes.padding_block,))
        host = torch.zeros((rows, FIRST_BLOCK + blocks), dtype=torch.int32)
        host[:, TOKENS], host[:, FIRST_BLOCK:] = 1, cache.sizes.padding_block
        self._hosts = cycle([host.clone().pin_memory() if on_cuda else host.clone() for _ in range(2)])
        self.inputs = host.to(model.device, copy=True)
        self._plan([])
        self._captured = capture([self.inputs], partial(_decode, model, cache, self.inputs))

    def replay(self, decodes: Packed, ids: Tensor) -> Tensor:
        contexts = decodes.row_contexts
        host, filled = next(self._hosts), len(contexts)
        rows = host.numpy()
        rows[:filled, POSITIONS] = decodes.positions.T
        rows[:filled, TOKENS] = [context.end for context in contexts]
        for row, context in enumerate(contexts):
            rows[row, FIRST_BLOCK : FIRST_BLOCK + len(context.blocks)] = context.blocks
        rows[filled:, :TOKENS], rows[filled:, TOKENS], rows[filled:, FIRST_BLOCK] = 0, 1, self._padding.blocks[0]
        self._plan(contexts)
        self.inputs.copy_(host, non_blocking=True)
        self.inputs[:filled, ID] = ids
        self._captured.replay()
        return self._captured.output

    def _plan(self, contexts: Sequence[Context]) -> None:
        padded = chain(contexts, repeat(self._padding, len(self.inputs) - len(contexts)))
        self._cache.plan_decode(list(padded), self._most_blocks)


def _decode(model: LanguageModel, cache: CapturedCache, inputs: Tensor) -> Tensor:
    """Raw next-token logits. inputs: int32 [R, FIRST_BLOCK + W]; returns float32 [R, vocab_size]."""
    embeds: Tensor = model.embed_tokens(inputs[:, ID])
    hidden = model.text(
        inputs_embeds=embeds[None],  # [1, R, D]
        position_ids=model.position_ids(inputs[:, POSITIONS].long().T),
        use_cache=False,
        batch=cache.decode_batch(inputs[:, FIRST_BLOCK:].contiguous(), inputs[:, TOKENS].contiguous()),
    ).last_hidden_state[0]
    logits: Tensor = model.lm_head(hidden)
    return logits.float()
