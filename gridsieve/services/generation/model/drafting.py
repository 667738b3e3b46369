"""Drafts tokens with the model's head, which reads every sequence one token ahead of the model.

    tokens          0   1   2   3   4     the model computed 0 … 3 and token 4 was sampled
    rows of the head
      a step's      0   1   2   3         row i: hidden states of token i, embedding of token i + 1, in the slot of i
      drafted                       4 …   its own output in place of hidden states, and the token that it drafted

`extend` follows each step, once its tokens are read, so the head's keys and values are there wherever the model's are:
in chunks, after prefix hits and preemption, for siblings. A request that has lost the step's blocks by then is left
out. `draft` comes before a step. What it writes is written again by the rows of accepted tokens, from hidden states.

Rows wait, as hidden states, where the next token has not arrived, and in answers that are not drafted for: then the
head computes up to MAX_WAITING of a request at once, or when it drafts again.

The last token of a block may have been followed by another one when the block was filled for another sequence, and rows
that wait at the end of an answer are never computed: drafts may be worse there. None of this can change an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import structlog
import torch
from torch import Tensor

from gridsieve.services.compute.compiled import compiled_whole, compiles
from gridsieve.services.compute.graphs import Capture
from gridsieve.services.compute.transfers import to_device
from gridsieve.services.generation.model.attention import make_cache
from gridsieve.services.generation.model.attention.cache import Batch, CacheSizes, CapturedCache
from gridsieve.services.generation.model.attention.running import running
from gridsieve.services.generation.model.draft_graphs import DraftGraphs
from gridsieve.services.generation.model.draft_head import DraftHead, Turns
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.media_embeds import uploaded
from gridsieve.services.generation.request.batch import (
    Chunk,
    Context,
    Int64Array,
    MediaRows,
    Packed,
    fill,
    media_rows,
    slots_of,
)
from gridsieve.services.generation.request.request import Request

# Rows of an answer that wait at most: so many are computed in hardly more time than one.
MAX_WAITING = 16

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Read:
    """How far the head has read a sequence. first: the rows before this one are computed.

    waiting: hidden states of the rows from `first` on, [.., D] each. output: [D], of the row before `first`; None if it
    was not computed here.
    """

    first: int
    waiting: tuple[Tensor, ...] = ()
    output: Tensor | None = None

    @property
    def end(self) -> int:
        return self.first + sum(map(len, self.waiting))


@dataclass(frozen=True, slots=True)
class _Rows:
    """The next rows [read.first, end) of a request. sampled: tokens after those that its answer has."""

    request: Request
    read: _Read
    end: int
    sampled: tuple[int, ...]

    @property
    def count(self) -> int:
        return self.end - self.read.first

    def tokens(self, ahead: int) -> Chunk:
        """The tokens of these rows, or with 1 the next ones."""
        return Chunk(self.request, self.read.first + ahead, self.end + ahead, False, self.sampled)


class Drafter:
    """Drafts for the requests of a runner of `model`, which has a head, with as many blocks of its own."""

    def __init__(self, model: LanguageModel, head: DraftHead, blocks: int, block_tokens: int) -> None:
        self._model, self._head = model, head
        sizes = head.sizes
        self._cache = make_cache(
            CacheSizes(1, blocks, block_tokens, sizes.heads, sizes.kv_heads, sizes.head_dim, model.fp8_cache),
            model.embed_tokens.weight,
        )
        # As heads of one axis are served.
        self._counts_tokens = sizes.axes < model.position_axes
        self._reads: WeakKeyDictionary[Request, _Read] = WeakKeyDictionary()
        self._compiled: Callable[..., Any] | None = None
        self._graphs: DraftGraphs | None = None

    @torch.inference_mode()
    def capture(self, max_sequences: int, max_blocks: int, capture: Capture) -> None:
        """Captures the head as graphs, for sequences of up to `max_blocks`. Leaves it eager if no graph can hold it."""
        embed, like = self._head.embed_tokens or self._model.embed_tokens, self._model.embed_tokens.weight
        try:
            cache = cast(CapturedCache, self._cache)
            self._graphs = DraftGraphs(self._head, embed, cache, like, max_sequences, max_blocks, capture)
        except RuntimeError as error:
            log.warning("drafting without graphs", error=str(error.__context__ or error))

    @torch.inference_mode()
    def compile(self, packed: Packed) -> None:
        """Compiles the head for the CPU, with rows as those of this step. Leaves it eager if that fails."""
        self._compiled = compiled_whole(self._head)
        if not compiles(lambda: self.try_rows(packed)):
            self._compiled = None

    @torch.inference_mode()
    def try_rows(self, packed: Packed) -> None:
        """Computes the rows that `extend` computes at most after a step like this, of zeros as hidden states."""
        device, shape = self._model.device, (len(packed.ids), self._model.hidden_size)
        embeds = self._embed(to_device(packed.ids, device))
        rows = embeds.new_zeros(shape)
        embeds.index_copy_(0, to_device(packed.media_rows, device), rows[: len(packed.media_rows)])
        turns = self._head.turns(to_device(packed.positions, device))
        self._rows(embeds, rows, turns, self._cache.batch(packed))

    @torch.inference_mode()
    def extend(self, chunks: Sequence[Chunk], hidden: Tensor, sampled: Mapping[Chunk, Sequence[int]]) -> None:
        """Reads what a step computed, while its requests still have the answers that they had in it.

        chunks: in packed order. hidden: [T, D], as `DraftHead.joined` gives them; may change afterwards. sampled: the
        accepted draft tokens and one more, of each chunk that samples and whose request did not fail.
        """
        due: list[_Rows] = []
        places = np.cumsum([0, *(chunk.tokens for chunk in chunks)])
        single = [number for number, chunk in enumerate(chunks) if chunk.tokens == 1]
        gathered = hidden[to_device(places[single], hidden.device)]
        alone = {number: gathered[row : row + 1] for row, number in enumerate(single)}
        for number, chunk in enumerate(chunks):
            request, ids, place = chunk.request, tuple(sampled.get(chunk, ())), int(places[number])
            before = self._reads.pop(request, None)
            lost = len(request.holding.blocks) * self._cache.sizes.block_tokens < chunk.known_end
            if (chunk.samples and not ids) or lost:
                continue
            if before is None or before.end != chunk.start:
                before = _Read(chunk.start)
            end = chunk.known_end + len(ids[1:])
            rows = alone[number] if number in alone else hidden[place : place + end - chunk.start]
            read = self._reads[request] = _Read(before.first, (*before.waiting, rows), before.output)
            if not _is_plain(chunk) or len(read.waiting) >= MAX_WAITING:
                due.append(_Rows(request, read, end if ids else min(end, request.ready_tokens - 1), ids))
        self._compute(due)

    @torch.inference_mode()
    def draft(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks with the head's tokens in place of those that they have room for, or with fewer.

        A token that the answer's grammar does not allow, and those after it, are left out.
        """
        asked = [chunk for chunk in chunks if chunk.draft_tokens]
        reads = [(each.request, self._reads.get(each.request, _Read(-1)), each.known_end - 1) for each in asked]
        self._compute(
            [_Rows(request, read, end, ()) for request, read, end in reads if read.end == end and read.waiting]
        )
        ready = sorted(
            (each for each in asked if self._output(each) is not None), key=lambda each: each.num_draft_tokens
        )
        found: dict[Chunk, Sequence[int]] = dict.fromkeys(asked, ())
        for _, group in groupby(ready, key=lambda chunk: chunk.num_draft_tokens):
            alike = [*group]
            found |= dict(zip(alike, self._guess(alike), strict=True))
        return [_drafted(chunk, found[chunk]) if chunk in found else chunk for chunk in chunks]

    def forget(self, chunks: Sequence[Chunk]) -> None:
        """Drafts nothing for these requests until they have sampled again."""
        for chunk in chunks:
            self._reads.pop(chunk.request, None)

    def _output(self, chunk: Chunk) -> Tensor | None:
        """That of the last row before the last known token of a chunk, [D]; None if it was not computed."""
        read = self._reads.get(chunk.request)
        return read.output if read and read.first == chunk.known_end - 1 else None

    def _guess(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """The head's tokens for each chunk, all of which have room for as many."""
        count = chunks[0].num_draft_tokens
        rows = torch.stack([output for chunk in chunks if (output := self._output(chunk)) is not None])
        places = np.array([chunk.known_end - 1 for chunk in chunks])
        contexts = [
            Context(place, place + 1, chunk.request.holding.blocks.array)
            for place, chunk in zip(places.tolist(), chunks, strict=True)
        ]
        if not self._counts_tokens:
            places += [self._head.sizes.ahead + each.request.prompt.delta for each in chunks]
        first = self._head.draft(rows)
        drafted = self._graphs.draft(first, rows, places, contexts, count - 1) if self._graphs else None
        drafted = self._after(first, rows, places, contexts, count - 1) if drafted is None else drafted
        tokens: list[list[int]] = torch.stack([first, *drafted], dim=1).tolist()
        return tokens

    def _after(
        self, ids: Tensor, rows: Tensor, places: Int64Array, contexts: Sequence[Context], count: int
    ) -> list[Tensor]:
        """As `DraftGraphs.draft`, without graphs."""
        places = np.add.outer(np.arange(count), places).reshape(-1)
        turns = self._head.turns(to_device(np.tile(places, (3, 1)), self._model.device))
        batch, drafted = self._cache.ahead(contexts, count), [ids]
        for number in range(count):
            embeds = self._embed(drafted[-1])
            own = slice(number * len(rows), (number + 1) * len(rows))
            here = batch or self._batch(contexts, len(contexts))
            rows = self._rows(embeds, rows, Turns(turns.cos[own], turns.sin[own]), here)
            contexts = [Context(each.end, each.end + 1, each.blocks) for each in contexts]
            drafted.append(self._head.draft(rows))
        return drafted[1:]

    def _compute(self, due: Sequence[_Rows]) -> None:
        """Computes rows that wait."""
        rows = sorted((each for each in due if each.count > 0), key=lambda each: each.count > 1)
        if not rows:
            return
        ends = np.cumsum([each.count for each in rows])
        ids, own, positions = (np.empty((*axes, ends[-1]), np.int64) for axes in ((), (), (3,)))
        contexts, media, hidden, at = list[Context](), list[MediaRows](), list[Tensor](), 0
        for each, end in zip(rows, ends.tolist(), strict=True):
            fill(each.tokens(1), ids[at:end], positions[:, at:end])
            if not self._head.sizes.ahead:
                fill(each.tokens(0), own[at:end], positions[:, at:end])
            media.extend(media_rows(each.tokens(1), at))
            contexts.append(Context(each.read.first, each.end, each.request.holding.blocks.array))
            hidden.extend(each.read.waiting)
            if each.end < each.read.end:  # the last one waits on
                hidden[-1] = hidden[-1][: each.end - each.read.end]
            at = end
        device = self._model.device
        if self._counts_tokens:
            positions = np.tile(np.concatenate([np.arange(each.start, each.end) for each in contexts]), (3, 1))
        embeds = self._embed(to_device(ids, device))
        if media:
            places = np.concatenate([np.arange(each.at, each.end) for each in media])
            embeds.index_copy_(0, to_device(places, device), uploaded(self._model, media, 0)[0])
        batch = self._batch(contexts, sum(each.count == 1 for each in rows))
        outputs = self._rows(embeds, torch.cat(hidden), self._head.turns(to_device(positions, device)), batch)
        for each, output in zip(rows, outputs[to_device(ends - 1, device)], strict=True):
            rest = each.read.waiting[-1][-1:].clone() if each.end < each.read.end else None
            self._reads[each.request] = _Read(each.end, () if rest is None else (rest,), output)

    def _rows(self, embeds: Tensor, hidden: Tensor, turns: Turns, batch: Batch) -> Tensor:
        """`DraftHead.forward`."""
        rows: Tensor
        if self._compiled is None:
            rows = self._head(embeds, hidden, turns, batch)
        else:
            with running(batch, None):
                rows = self._compiled(embeds=embeds, hidden=hidden, turns=turns)
        return rows

    def _embed(self, ids: Tensor) -> Tensor:
        rows: Tensor = (self._head.embed_tokens or self._model.embed_tokens)(ids)
        return rows

    def _batch(self, contexts: Sequence[Context], num_single: int) -> Batch:
        """Of rows that are written to the cache, those of one row a sequence first."""
        size = self._cache.sizes.block_tokens
        none = np.empty(0, np.int64)
        packed = Packed(
            contexts=tuple(each._replace(blocks=each.blocks[: -(-each.end // size)]) for each in contexts),
            num_decodes=num_single,
            ids=none,
            positions=none,
            slots=np.concatenate([slots_of(each.blocks, each.start, each.end, size) for each in contexts]),
            media_rows=none,
            logit_rows=none,
        )
        return self._cache.batch(packed)


def _is_plain(chunk: Chunk) -> bool:
    """Whether it is a token of an answer, without drafts."""
    return chunk.tokens == 1 and chunk.samples and chunk.start >= chunk.request.prompt.tokens


def _drafted(chunk: Chunk, tokens: Sequence[int]) -> Chunk:
    """The chunk with these tokens as drafts, up to the first that the answer's grammar does not allow."""
    document, drafted = chunk.request.sampling_state.document, bool(tokens)
    if document and tokens:
        tokens = tokens[: document.allowed_of(tokens)]
    end = chunk.known_end + len(tokens)
    return Chunk(chunk.request, chunk.start, end, samples=True, draft_tokens=tuple(tokens), drafted=drafted)
