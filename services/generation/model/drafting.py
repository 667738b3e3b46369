"""Drafts tokens with the model's head, which reads every sequence one token ahead of the model.

    tokens          0   1   2   3   4     the model computed 0 … 3 and token 4 was sampled
    rows of the head
      a step's      0   1   2   3         row i: hidden states of token i, embedding of token i + 1, in the slot of i
      drafted                       4 …   its own output in place of hidden states, and the token that it drafted

`extend` follows each step, once its tokens are read and before any request gives up blocks, so the head's keys and
values are there wherever the model's are: in chunks, after prefix hits and preemption, for siblings. `draft` comes
before the next step. What it writes is written again by the rows of accepted tokens, from hidden states.

Where the token after a chunk has not arrived, the hidden states of the last one are kept for the chunk after it. The
last token of a block may have been followed by another one when the block was filled for another sequence; so drafts
may be worse there. None of this can change an answer: drafts are verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from framesieve.services.compute.transfers import to_device
from framesieve.services.generation.model.attention import make_cache
from framesieve.services.generation.model.attention.cache import CacheSizes
from framesieve.services.generation.model.draft_head import DraftHead
from framesieve.services.generation.model.language_model import LanguageModel
from framesieve.services.generation.model.media_embeds import uploaded
from framesieve.services.generation.request.batch import (
    Chunk,
    Context,
    Int64Array,
    MediaRows,
    Packed,
    fill,
    media_rows,
    slots_of,
)
from framesieve.services.generation.request.request import Request


@dataclass(frozen=True, slots=True)
class _Read:
    """How far the head has read a sequence: all rows before that of token `tokens` − 1.

    hidden: [D], of token `tokens` − 1, whose next token is not known; or, if that is known and not computed by the
        model, the output of the row before: drafts can begin.
    """

    tokens: int
    hidden: Tensor
    drafts: bool


class _Rows(NamedTuple):
    """Rows [first, end) of a sequence. sources: where their hidden states are, among a step's and those kept."""

    chunk: Chunk
    first: int
    end: int
    sources: Sequence[int]


class Drafter:
    """Drafts for the requests of a runner of `model`, which has a head, with as many blocks of its own."""

    def __init__(self, model: LanguageModel, head: DraftHead, blocks: int, block_tokens: int) -> None:
        self._model, self._head = model, head
        sizes = head.sizes
        self._cache = make_cache(
            CacheSizes(1, blocks, block_tokens, sizes.heads, sizes.kv_heads, sizes.head_dim, model.fp8_cache),
            model.embed_tokens.weight,
        )
        self._read: WeakKeyDictionary[Request, _Read] = WeakKeyDictionary()

    @torch.inference_mode()
    def extend(self, chunks: Sequence[Chunk], hidden: Tensor, sampled: Mapping[Chunk, Sequence[int]]) -> None:
        """Reads what a step computed, while its requests still have the blocks and answers that they had in it.

        chunks: in packed order. hidden: [T, D], as `DraftHead.joined` gives them. sampled: the accepted draft tokens
        and one more, of each chunk that samples and whose request did not fail.
        """
        rows: list[_Rows] = []
        kept: list[Tensor] = []
        at, carries = 0, list[tuple[Request, _Read]]()
        for chunk in chunks:
            request, ids = chunk.request, sampled.get(chunk, ())
            before, place, at = self._read.pop(request, None), at, at + chunk.tokens
            if chunk.samples and not ids:
                continue
            end = chunk.end - chunk.num_draft_tokens + len(ids[1:])
            known = end if chunk.samples else min(end, request.ready_tokens - 1)
            first, sources = chunk.start, list(range(place, place + known - chunk.start))
            if before and before.tokens == chunk.start and not before.drafts and known >= first:
                first, sources = first - 1, [len(hidden) + len(kept), *sources]
                kept.append(before.hidden)
            if known < end:  # the last one
                carries.append((request, _Read(end, hidden[place + end - chunk.start - 1], False)))
            if sources:
                rows.append(_Rows(_ahead(chunk, first, known, ids), first, known, sources))
        if rows:
            rows.sort(key=lambda each: each.end - each.first > 1)
            outputs = self._compute(rows, torch.cat([hidden, torch.stack(kept)]) if kept else hidden)
            last = np.cumsum([each.end - each.first for each in rows]) - 1
            ends = outputs[to_device(last, outputs.device)]
            for each, output in zip(rows, ends, strict=True):
                if each.chunk.samples:
                    self._read[each.chunk.request] = _Read(each.end + 1, output, True)
        self._read.update(carries)

    @torch.inference_mode()
    def draft(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """The chunks with the head's tokens in place of those that they have room for, or with fewer.

        A token that the answer's grammar does not allow, and those after it, are left out.
        """
        asked = [chunk for chunk in chunks if chunk.draft_tokens]
        ready = [chunk for chunk in asked if self._ready(chunk)]
        found: dict[Chunk, Sequence[int]] = dict.fromkeys(asked, ())
        if ready:
            ready.sort(key=lambda chunk: -chunk.num_draft_tokens)
            found |= dict(zip(ready, self._guess(ready), strict=True))
        return [_drafted(chunk, found[chunk]) if chunk in found else chunk for chunk in chunks]

    def forget(self, chunks: Sequence[Chunk]) -> None:
        """Drafts nothing for these requests until they have sampled again."""
        for chunk in chunks:
            self._read.pop(chunk.request, None)

    def _ready(self, chunk: Chunk) -> bool:
        read = self._read.get(chunk.request)
        return read is not None and read.drafts and read.tokens == chunk.start + 1

    def _guess(self, chunks: Sequence[Chunk]) -> list[list[int]]:
        """The head's tokens for each chunk, as many as it has room for; most first."""
        device = self._model.device
        rows = torch.stack([self._read[chunk.request].hidden for chunk in chunks])
        drafted: list[Tensor] = []
        for number in range(chunks[0].num_draft_tokens):
            drafted.append(self._head.draft(rows))
            active = [chunk for chunk in chunks if chunk.num_draft_tokens > number + 1]
            if not active:
                break
            places = np.array([chunk.start + number for chunk in active])
            contexts = tuple(
                Context(place, place + 1, chunk.request.blocks.array)
                for place, chunk in zip(places.tolist(), active, strict=True)
            )
            deltas = np.array([chunk.request.prompt.delta for chunk in active])
            packed = self._packed(contexts, len(active), np.tile(places + 1 + deltas, (3, 1)))
            embeds = self._embed(drafted[-1][: len(active)])
            positions = to_device(packed.positions, device)
            rows = self._head(embeds, rows[: len(active)], positions, self._cache.batch(packed))
        columns = [each.tolist() for each in drafted]
        return [[column[row] for column in columns[: chunk.num_draft_tokens]] for row, chunk in enumerate(chunks)]

    def _compute(self, rows: Sequence[_Rows], hidden: Tensor) -> Tensor:
        """The head's outputs, [T, D], of rows whose hidden states are in `hidden`; those of one token first."""
        total = sum(each.end - each.first for each in rows)
        ids, positions = np.empty(total, np.int64), np.empty((3, total), np.int64)
        contexts, media, at = list[Context](), list[MediaRows](), 0
        for each in rows:
            end = at + each.end - each.first
            fill(each.chunk, ids[at:end], positions[:, at:end])
            media.extend(media_rows(each.chunk, at))
            contexts.append(Context(each.first, each.end, each.chunk.request.blocks.array))
            at = end
        device = self._model.device
        num_single = sum(each.end - each.first == 1 for each in rows)
        packed = self._packed(tuple(contexts), num_single, positions)
        embeds = self._embed(to_device(ids, device))
        if media:
            places = np.concatenate([np.arange(each.at, each.end) for each in media])
            embeds.index_copy_(0, to_device(places, device), uploaded(self._model, media, 0)[0])
        sources = np.concatenate([np.array(each.sources, np.int64) for each in rows])
        hidden = hidden[to_device(sources, device)]
        output: Tensor = self._head(embeds, hidden, to_device(packed.positions, device), self._cache.batch(packed))
        return output

    def _embed(self, ids: Tensor) -> Tensor:
        rows: Tensor = (self._head.embed_tokens or self._model.embed_tokens)(ids)
        return rows

    def _packed(self, contexts: tuple[Context, ...], num_single: int, positions: Int64Array) -> Packed:
        """positions: int64 [3, T], of the next tokens; a head without sections counts tokens instead."""
        size = self._cache.sizes.block_tokens
        if not self._head.sizes.rotary.sections:
            positions = np.tile(np.concatenate([np.arange(each.start, each.end) for each in contexts]) + 1, (3, 1))
        none = np.empty(0, np.int64)
        return Packed(
            contexts=tuple(each._replace(blocks=each.blocks[: -(-each.end // size)]) for each in contexts),
            num_decodes=num_single,
            ids=none,
            positions=positions,
            slots=np.concatenate([slots_of(each.blocks, each.start, each.end, size) for each in contexts]),
            media_rows=none,
            logit_rows=none,
        )


def _ahead(chunk: Chunk, first: int, end: int, sampled: Sequence[int]) -> Chunk:
    """The tokens after rows [first, end), of which the last may be sampled ones that are not in the answer yet."""
    return Chunk(chunk.request, first + 1, end + 1, chunk.samples, tuple(sampled))


def _drafted(chunk: Chunk, tokens: Sequence[int]) -> Chunk:
    """The chunk with these tokens as drafts, up to the first that the answer's grammar does not allow."""
    document = chunk.request.sampling_state.document
    if document and tokens:
        tokens = tokens[: document.allowed_of(tokens)]
    start = chunk.start
    return Chunk(chunk.request, start, start + 1 + len(tokens), samples=True, draft_tokens=tuple(tokens))
