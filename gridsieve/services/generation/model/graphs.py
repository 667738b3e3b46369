"""CUDA graphs of decode steps: captured at startup for some sizes, and replayed for steps of answers alone.

    of each row:  [ id | t h w | tokens | states | block block … ]   int32, copied to the device in one piece
    rows beyond those of a step hold a sequence of one token in the cache's padding block

    without drafts    each sequence has one row
    with drafts       the rows of a sequence follow each other, and attention reads its context once for all of them

With recurrent states, the rows of a sequence with drafts are divided where a state is written, as `states.Part` says.
These arrays are the only input of a replay, beside what the cache plans on the host: slots to write, contexts and
positions follow from them. All graphs write their logits into one buffer. Only caches whose attention reads blocks in
place are captured. This module does not know CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, repeat

import torch
from torch import Tensor

from gridsieve.services.compute.graphs import Capture, doubling
from gridsieve.services.compute.transfers import pinned_for, to_device
from gridsieve.services.generation.model.attention.cache import CapturedCache
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.states import PADDING, ZERO, PartTable, StateCache
from gridsieve.services.generation.request.batch import Context, Packed

# Columns of a row: token id, positions, length of the sequence in tokens, slots of the recurrent states that it reads
# and writes, and from FIRST_BLOCK on its block table.
ID, POSITIONS, TOKENS, STATES, FIRST_BLOCK = 0, slice(1, 4), 4, slice(5, 7), 7


@dataclass(frozen=True, slots=True)
class Shape:
    """The most that a graph computes. most_rows: of one sequence; 1: every sequence has one row."""

    rows: int
    sequences: int
    most_rows: int = 1

    def holds(self, decodes: Packed) -> bool:
        most = max(context.tokens for context in decodes.contexts)
        fits = len(decodes.ids) <= self.rows and len(decodes.contexts) <= self.sequences
        return fits and (most > 1) == (self.most_rows > 1) and most <= self.most_rows


def shapes(max_sequences: int, max_draft_tokens: int, max_drafted_rows: int, recurrent: bool) -> list[Shape]:
    """Of the graphs for up to so many sequences, ascending by rows.

    max_drafted_rows: of a graph with drafts. recurrent: whether the model has recurrent states. Then a sequence may
    have rows of accepted drafts, which are computed again, beside its drafts; and a sequence that is not there costs as
    much as another one, so a graph has no more of them than its rows need.
    """
    found = [Shape(each, each) for each in doubling(1, max_sequences)]
    most = 1 + (2 if recurrent else 1) * max_draft_tokens
    if recurrent and 1 < most <= max_drafted_rows:
        sequences = doubling(1, min(max_sequences, max_drafted_rows // most))
        found += [Shape(most * each, each, most) for each in sequences]
    elif not recurrent and most > 1:
        found += [Shape(each, each, most) for each in doubling(2, min(most * max_sequences, max_drafted_rows))]
    return sorted(found, key=lambda each: each.rows)


class DecodeGraphs:
    """Graphs of steps in which the last row of every chunk is sampled."""

    def __init__(
        self,
        model: LanguageModel,
        cache: CapturedCache,
        states: StateCache | None,
        ascending: Sequence[Shape],
        max_blocks: int,
        capture: Capture,
    ) -> None:
        """Captures the largest first: smaller graphs reuse its memory. Raises RuntimeError as `capture`."""
        self._max_blocks = max_blocks
        max_rows = ascending[-1].rows
        # For 512 rows of 152 k tokens 0.3 GB; with a buffer for each size, the graphs would take twice as much.
        logits = torch.empty((max_rows, model.vocab_size), dtype=torch.float32, device=model.device)
        hidden = None
        if model.draft:
            hidden = torch.empty((max_rows, model.hidden_size), dtype=model.dtype, device=model.device)
        output = _Output(logits, hidden)
        largest_first = {
            shape: _Graph(model, cache, states, shape, max_blocks, output.first(shape.rows), capture)
            for shape in reversed(ascending)
        }
        self._graphs = {shape: largest_first[shape] for shape in ascending}

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(self, decodes: Packed, ids: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Raw logits of `logit_rows`, float32 [S, vocab_size], and what the head that drafts reads, [T, D]; None if no
        graph fits. Valid until the next replay.

        decodes: `decodes_only`. ids: int64 [T], theirs, on the device.
        """
        if max(len(context.blocks) for context in decodes.contexts) > self._max_blocks:
            return None
        graph = next((each for shape, each in self._graphs.items() if shape.holds(decodes)), None)
        output = graph.replay(decodes, ids) if graph else None
        if output is None:
            return None
        output, rows = output.first(len(ids)), decodes.logit_rows
        sampled = output.logits if len(rows) == len(ids) else output.logits[to_device(rows, ids.device)]
        return sampled, output.hidden


@dataclass(frozen=True, slots=True)
class _Output:
    """logits: float32 [rows, vocab_size]. hidden: [rows, D], what the head that drafts reads; None without a head."""

    logits: Tensor
    hidden: Tensor | None

    def first(self, rows: int) -> _Output:
        return _Output(self.logits[:rows], None if self.hidden is None else self.hidden[:rows])


class _Graph:
    """The graph of a shape, whose rows are those of `output`.

    Its input, int32 [rows, FIRST_BLOCK + blocks], and with drafts the parts of recurrent states, are filled in pinned
    host memory and copied asynchronously. There are two copies of them, because a step is launched before the one
    before it was read.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: CapturedCache,
        states: StateCache | None,
        shape: Shape,
        blocks: int,
        output: _Output,
        capture: Capture,
    ) -> None:
        self._hidden = output.hidden
        self._cache, self._shape, self._max_blocks = cache, shape, blocks
        self._padding = Context(0, 1, (cache.sizes.padding_block,))
        host = torch.zeros((shape.rows, FIRST_BLOCK + blocks), dtype=torch.int32)
        host[:, TOKENS], host[:, FIRST_BLOCK:] = 1, cache.sizes.padding_block
        host[:, STATES] = torch.tensor([ZERO, PADDING])
        inputs = [host]
        self._table = (
            PartTable(shape.sequences, shape.most_rows, shape.rows) if states and shape.most_rows > 1 else None
        )
        if self._table:
            inputs.append(self._table.empty())
        self._hosts = cycle([[pinned_for(each.clone(), model.device) for each in inputs] for _ in range(2)])
        self.inputs = [each.to(model.device, copy=True) for each in inputs]
        self._plan([], shape.rows)
        self._captured = capture(self.inputs, partial(_decode, model, cache, states, shape, self.inputs, output))

    def replay(self, decodes: Packed, ids: Tensor) -> _Output | None:
        """None if the parts of its recurrent states do not fit."""
        hosts = next(self._hosts)
        if self._table and not self._table.fill(hosts[1].numpy(), decodes):
            return None
        contexts = decodes.row_contexts
        filled, rows = len(contexts), hosts[0].numpy()
        rows[:filled, POSITIONS] = decodes.positions.T
        rows[:filled, TOKENS] = [context.end for context in contexts]
        for row, context in enumerate(contexts):
            rows[row, FIRST_BLOCK : FIRST_BLOCK + len(context.blocks)] = context.blocks
        if decodes.states and not self._table:
            rows[:filled, STATES] = [(use.read, use.write) for use in decodes.states]
        rows[filled:, :TOKENS], rows[filled:, TOKENS], rows[filled:, FIRST_BLOCK] = 0, 1, self._padding.blocks[0]
        rows[filled:, STATES] = ZERO, PADDING
        self._plan(decodes.contexts, len(rows) - filled)
        for buffer, host in zip(self.inputs, hosts, strict=True):
            buffer.copy_(host, non_blocking=True)
        self.inputs[0][:filled, ID] = ids
        self._captured.replay()
        return _Output(self._captured.output, self._hidden)

    def _plan(self, contexts: Sequence[Context], padding: int) -> None:
        self._cache.plan_decode([*contexts, *repeat(self._padding, padding)], self._max_blocks, self._shape.most_rows)


def _decode(
    model: LanguageModel,
    cache: CapturedCache,
    states: StateCache | None,
    shape: Shape,
    inputs: Sequence[Tensor],
    output: _Output,
) -> Tensor:
    """Raw next-token logits, written into `output`. inputs: int32 [R, FIRST_BLOCK + W], and the parts of states."""
    rows, *parts = inputs
    keywords: dict[str, object] = {}
    if states:
        keywords["states"] = (
            states.parts_batch(parts[0].long()) if parts else states.decode_batch(*rows[:, STATES].long().T)
        )
    embeds: Tensor = model.embed_tokens(rows[:, ID])
    last = model.text(
        inputs_embeds=embeds[None],  # [1, R, D]
        position_ids=model.position_ids(rows[:, POSITIONS].long().T),
        use_cache=False,
        **keywords,
        batch=cache.decode_batch(rows[:, FIRST_BLOCK:].contiguous(), rows[:, TOKENS].contiguous(), shape.most_rows),
    ).last_hidden_state[0]
    if output.hidden is not None and model.draft:
        output.hidden.copy_(model.draft.hidden())
    return output.logits.copy_(model.lm_head(last))
