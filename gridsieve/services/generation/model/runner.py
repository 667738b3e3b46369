"""Runs the chunks of a step as one packed forward and samples from its logits.

It owns the model and the KV cache, and knows nothing of scheduling.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from gridsieve.services.compute.compiled import compiled_whole, compiles
from gridsieve.services.compute.graphs import Capture
from gridsieve.services.compute.transfers import to_device
from gridsieve.services.generation.model.attention import make_cache
from gridsieve.services.generation.model.attention.cache import CacheSizes, CapturedCache
from gridsieve.services.generation.model.attention.running import running
from gridsieve.services.generation.model.attention.weights import WatchedBatch, WatchedRows
from gridsieve.services.generation.model.determinism import row_sizes
from gridsieve.services.generation.model.drafting import Drafter
from gridsieve.services.generation.model.experts import rows_without_wait
from gridsieve.services.generation.model.fixed_sizes import in_fixed_sizes
from gridsieve.services.generation.model.fixed_states import FixedStateCache
from gridsieve.services.generation.model.graphs import DecodeGraphs, shapes
from gridsieve.services.generation.model.language_model import LanguageModel
from gridsieve.services.generation.model.levels import numbers
from gridsieve.services.generation.model.media_embeds import uploaded
from gridsieve.services.generation.model.states import RESERVED, StateCache
from gridsieve.services.generation.request.attending import Attending
from gridsieve.services.generation.request.batch import (
    Chunk,
    Context,
    Packed,
    decodes_first,
    pack,
    slots_of,
)
from gridsieve.services.generation.request.division import divide
from gridsieve.services.generation.request.reader import Reader
from gridsieve.services.generation.request.request import Request, Status
from gridsieve.services.generation.sampling.rows import ReadRows
from gridsieve.services.generation.sampling.sampler import (
    SampledBatch,
    SampledToken,
    SamplingState,
    choose,
    sample_and_verify,
)

# A size that no other dimension has: the compiler takes those that are equal in its first call to be equal in all.
COMPILED_WITH_TOKENS = 7
# Of a captured step with drafts. With more, a device computes for longer than the host launches.
MAX_DRAFTED_ROWS = 512

log = structlog.get_logger()


class OutOfStep(Exception):
    """The ranks of a tensor-parallel model no longer compute the same steps, so their caches differ from now on."""


class OtherRanks(Protocol):
    """The other ranks of a tensor-parallel model."""

    def broadcast(self, packed: Packed, media_embeds: Tensor | None, unread: Tensor | None) -> None:
        """Makes each of them compute what this rank computes next."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step whose forward the device may still be computing.

    chunks: in packed order. logits: as `Runner.forward` returns them. began_ns: when its launch began, on the
    monotonic clock. replayed: whether a graph computed it. hidden: [T, D], what the head that drafts reads of it; None
    without a head.
    """

    chunks: Sequence[Chunk]
    logits: Tensor
    began_ns: int
    replayed: bool
    hidden: Tensor | None

    @torch.inference_mode()
    def sample(self) -> SampledStep:
        """Makes the device sample, without waiting for it unless there are draft tokens.

        The host knows all tokens before those that are sampled. Nothing is drawn for requests that have ended.
        """
        sampling = [chunk for chunk in self.chunks if chunk.samples]
        tokens: SampledBatch | ReadRows | list[list[SampledToken] | Exception] = []
        drafts = [chunk.draft_tokens for chunk in sampling]
        if any(drafts):
            states = [chunk.request.sampling_state for chunk in sampling]
            tokens = sample_and_verify(self.logits, states, drafts)
        elif sampling and isinstance(sampling[0].request, Reader):
            tokens = ReadRows(self.logits)
        elif sampling:
            # Also if all have ended: reading the result tells that the forward's pinned inputs may be used again.
            tokens = choose(self.logits, [_state_of(chunk.request) for chunk in sampling])
        return SampledStep(self.chunks, sampling, tokens, self.began_ns, self.replayed, self.hidden)


@dataclass(frozen=True, slots=True)
class SampledStep:
    """A step whose tokens the device may still be sampling.

    sampling: the chunks that sample. tokens: their tokens; those of a step with draft tokens are known. Of a model that
    reads, their rows.
    chunks, began_ns, replayed, hidden: as in `LaunchedStep`.
    """

    chunks: Sequence[Chunk]
    sampling: Sequence[Chunk]
    tokens: SampledBatch | ReadRows | list[list[SampledToken] | Exception]
    began_ns: int
    replayed: bool
    hidden: Tensor | None

    def tokens_of(self, requests: Sequence[Request]) -> Tensor:
        """The sampled tokens of some requests, int64 [R], on the device. Not of a step with draft tokens."""
        assert isinstance(self.tokens, SampledBatch)
        rows = {chunk.request: row for row, chunk in enumerate(self.sampling)}
        token_ids = self.tokens.token_ids
        return token_ids[to_device(np.array([rows[each] for each in requests], np.int64), token_ids.device)]

    def read(self) -> dict[Chunk, list[SampledToken] | Exception]:
        """For each chunk that samples, its accepted draft tokens and one more token, or why its request must fail.

        Waits for the device. What it gives for requests that had ended has no meaning.
        """
        if isinstance(self.tokens, ReadRows):
            return {chunk: [row] for chunk, row in zip(self.sampling, self.tokens.read(), strict=True)}
        if not isinstance(self.tokens, SampledBatch):
            return dict(zip(self.sampling, self.tokens, strict=True))
        tokens = [[token] for token in self.tokens.read()]
        found: dict[Chunk, list[SampledToken] | Exception] = dict(zip(self.sampling, tokens, strict=True))
        return found | {self.sampling[row]: error for row, error in self.tokens.errors.items()}


class Runner:
    """Runs a language model over a paged KV cache of `blocks` blocks of `block_tokens` tokens each.

    state_slots: number of slots for recurrent states, for models that have any; reserved slots are added to it.
    row_sizes: how many rows a forward may have; empty: any number.
    """

    def __init__(
        self,
        model: LanguageModel,
        blocks: int,
        block_tokens: int,
        workers: OtherRanks | None = None,
        state_slots: int = 0,
    ) -> None:
        self.model = model
        self._workers = workers
        sizes = CacheSizes(
            model.layers,
            blocks,
            block_tokens,
            model.heads,
            model.kv_heads,
            model.head_dim,
            model.fp8_cache,
            model.deterministic,
        )
        like = model.embed_tokens.weight
        self._cache = make_cache(sizes, like)
        states = FixedStateCache if model.deterministic else StateCache
        self._states = states(model.states, RESERVED + state_slots, like) if model.states else None
        self.row_sizes = row_sizes(model)[:1]
        self._graphs: DecodeGraphs | None = None
        self.replayed = False  # whether a graph computed the last step
        self._hidden: Tensor | None = None  # of the last step, as the head that drafts reads it
        self.drafter = Drafter(model, model.draft, blocks, block_tokens) if model.draft else None
        self._compiled: Callable[..., Any] | None = None

    def compile(self) -> bool:
        """Compiles the text model and its head for the CPU. Returns False, and leaves them eager, if that fails.

        Not with adapters, nor a deterministic model.
        """
        tokens, block_tokens = COMPILED_WITH_TOKENS, self._cache.sizes.block_tokens
        blocks = range(-(-tokens // block_tokens))
        packed = Packed(
            contexts=(Context(0, tokens, blocks),),
            num_decodes=0,
            ids=np.zeros(tokens, np.int64),
            positions=np.tile(np.arange(tokens), (3, 1)),
            slots=slots_of(blocks, 0, tokens, block_tokens),
            media_rows=np.empty(0, np.int64),
            logit_rows=np.array([tokens - 1]),
        )
        self._compiled = compiled_whole(self.model.text)
        if not compiles(lambda: self.compute(packed, None)):
            self._compiled = None
        elif self.drafter:
            self.drafter.compile(packed)
        return self._compiled is not None

    @property
    def padding_block(self) -> int:
        """The block of the cache that no sequence has."""
        return self._cache.sizes.padding_block

    @property
    def unwatched(self) -> str:
        """Where it cannot tell what rows attend to; empty: it can."""
        if self._workers is not None:
            return "with --tensor-parallel, where each rank has a part of the heads"
        return "with --deterministic, which divides chunks" if self.row_sizes else ""

    @property
    def captures(self) -> bool:
        """Whether decode steps can be captured, as far as attention and the division of steps are concerned."""
        return self._cache.captures and not self.row_sizes

    @torch.inference_mode()
    def capture_decoding(
        self, max_sequences: int, max_tokens: int, capture: Capture, max_draft_tokens: int = 0
    ) -> bool:
        """Captures decode steps of up to `max_sequences` requests of up to `max_tokens` tokens as graphs, with and
        without draft tokens.

        max_draft_tokens: of one request; 0: none.
        Returns False, and leaves decoding eager, if the model does something that no graph can hold, or if attention
        does not read the cache's blocks in place.
        """
        if not self.captures:
            return False
        start = time.perf_counter()
        blocks = -(-max_tokens // self._cache.sizes.block_tokens)
        try:
            cache, drafted_rows = cast(CapturedCache, self._cache), rows_without_wait(self.model.text, MAX_DRAFTED_ROWS)
            ascending = shapes(max_sequences, max_draft_tokens, drafted_rows, self._states is not None)
            self._graphs = DecodeGraphs(self.model, cache, self._states, ascending, blocks, capture)
        except RuntimeError as error:
            # torch raises a second error when the broken capture is closed; its context is the cause.
            log.warning("decoding without graphs", error=str(error.__context__ or error))
            return False
        if self.drafter:
            self.drafter.capture(max_sequences, blocks, capture)
        log.info("decode steps captured", graphs=len(self._graphs), seconds=round(time.perf_counter() - start, 3))
        return True

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk], before: SampledStep | None = None) -> LaunchedStep:
        """Makes the device compute chunks, without waiting for it.

        before: the step before this one, if it was not read; chunks of its requests take its tokens on the device.
        """
        began_ns, chunks = time.monotonic_ns(), decodes_first(chunks)
        late = [chunk.request for chunk in chunks if chunk.request.num_unread]
        assert before or not late, "a token that was not read belongs to the step before"
        logits = self.forward(chunks, before.tokens_of(late) if before and late else None)
        return LaunchedStep(chunks, logits, began_ns, self.replayed, self._hidden)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[Chunk], unread: Tensor | None = None) -> Tensor:
        """Computes the keys and values of chunks in packed order.

        unread: int64 [U], the tokens of the requests that have an unread one, in the order of the chunks.

        Returns raw logits, float32 [S, vocab_size], or what the model reads, float32 [S, W]: for each chunk that
        samples, in order, one row for each draft token and one for the token before them. Under tensor parallelism, a
        failure raises OutOfStep once the step was sent to the other ranks; a failure before that leaves them as they
        were.
        """
        packed, media = pack(chunks, self._cache.sizes.block_tokens)
        media_embeds = uploaded(self.model, media, self.model.embed_levels) if media else None
        if self._workers is None:
            watched = [*self._watched(chunks, packed)]
            logits = self.compute(packed, media_embeds, unread, [rows for _, _, rows in watched])
            for request, chunk, rows in watched:
                request.add(chunk, rows.means())
            return logits
        try:
            self._workers.broadcast(packed, media_embeds, unread)
            return self.compute(packed, media_embeds, unread)
        except Exception as error:
            raise OutOfStep(str(error)) from error

    @torch.inference_mode()
    def compute(
        self,
        packed: Packed,
        media_embeds: Tensor | None,
        unread: Tensor | None = None,
        watched: Sequence[WatchedRows] = (),
    ) -> Tensor:
        """Raw logits of `packed.logit_rows`, float32 [S, vocab_size].

        media_embeds: [1 + embed_levels, M, D], embeddings and levels of the media rows; None if there are none.
        unread: int64 [U], the tokens of `packed.unread_rows`; None if there are none.
        watched: rows of which it adds up what they attend to.
        """
        self.model.adapters.rows = packed.adapted
        ids = to_device(packed.ids, self.model.device)
        if unread is not None:
            ids = ids.index_copy(0, to_device(packed.unread_rows, self.model.device), unread)
        if self.row_sizes:
            return self._in_fixed_sizes(packed, ids, media_embeds)
        # A step is one forward, a graph's or an eager one: two would read all weights twice.
        replayed = self._graphs.replay(packed, ids) if self._graphs and packed.decodes_only and not watched else None
        self.replayed = replayed is not None
        if replayed is None:
            return self._forward(packed, ids, media_embeds, watched)
        logits, hidden = replayed
        self._hidden = None if hidden is None else hidden.clone()  # the next step may be launched before it is read
        return logits

    def _forward(
        self, packed: Packed, ids: Tensor, media_embeds: Tensor | None, watched: Sequence[WatchedRows]
    ) -> Tensor:
        """ids: int64 [T], on the device, with those of unread rows."""
        states = self._run_text(packed, ids, media_embeds, watched)
        logits: Tensor = self.model.lm_head(states[to_device(packed.logit_rows, self.model.device)])
        self._hidden = self.model.draft.hidden() if self.model.draft else None
        return logits.float()

    def _in_fixed_sizes(self, packed: Packed, ids: Tensor, media_embeds: Tensor | None) -> Tensor:
        """As `_forward`, by forwards of `row_sizes` rows."""
        outputs, hidden = list[Tensor](), list[Tensor]()
        sizes = self._cache.sizes
        for each in divide(packed, self.row_sizes, sizes.block_tokens, sizes.padding_block):
            self.model.adapters.rows = each.packed.adapted
            own, count = F.pad(ids[each.first : each.end], (0, each.padding)), each.end - each.first
            media = None
            if media_embeds is not None and len(each.packed.media_rows):
                media = media_embeds[:, each.media]
            outputs.append(self._run_text(each.packed, own, media)[:count])
            if self.model.draft:
                hidden.append(self.model.draft.hidden()[:count])
        self._hidden = torch.cat(hidden) if hidden else None
        rows = torch.cat(outputs)[to_device(packed.logit_rows, self.model.device)]
        return in_fixed_sizes(self.model.lm_head, rows, self.row_sizes).float()

    def _run_text(
        self, packed: Packed, ids: Tensor, media_embeds: Tensor | None, watched: Sequence[WatchedRows] = ()
    ) -> Tensor:
        """The last hidden state of every row, [T, D]. Arguments as of `_forward`."""
        embeds: Tensor = self.model.embed_tokens(ids)
        levels = None if media_embeds is None else self._put_media(packed, embeds, media_embeds)
        embeds = embeds[None]  # [1, T, D]
        positions = self.model.position_ids(to_device(packed.positions, self.model.device))
        batch, text = self._cache.batch(packed), self.model.text
        if watched:
            batch = WatchedBatch(self._cache, batch, watched)
        states = self._states.batch(packed) if self._states else None
        call: dict[str, Any] = {"inputs_embeds": embeds, "position_ids": positions, "use_cache": False}
        if self._compiled is None:
            if levels:
                call["visual_pos_masks"], call["deepstack_visual_embeds"] = levels
            if states:
                call["states"] = states
            output = text(**call, batch=batch)
        else:
            if self.model.embed_levels:
                call["deepstack_visual_embeds"] = numbers(self.model.embed_levels)
            with running(batch, states, levels):
                output = self._compiled(**call)
        found: Tensor = output.last_hidden_state[0]
        return found

    def _watched(self, chunks: Sequence[Chunk], packed: Packed) -> Iterator[tuple[Attending, Chunk, WatchedRows]]:
        """The rows of answers that are computed again."""
        end = 0
        for chunk, context in zip(chunks, packed.contexts, strict=True):
            end, request = end + chunk.tokens, chunk.request
            if isinstance(request, Attending) and (count := request.rows_of(chunk)):
                slots = to_device(
                    slots_of(context.blocks, 0, context.end, self._cache.sizes.block_tokens), self.model.device
                )
                sizes, rows = request.prompt.num_kept, slice(end - count, end)
                yield request, chunk, WatchedRows(rows, slots, request.media(), sizes, keeps=request.keeps)

    def _put_media(self, packed: Packed, embeds: Tensor, media_embeds: Tensor) -> tuple[Tensor, Tensor] | None:
        """Writes media rows into `embeds` [T, D], and returns their indices and further levels, if there are any."""
        rows = to_device(packed.media_rows, self.model.device)
        embeds.index_copy_(0, rows, media_embeds[0])
        return (rows, media_embeds[1:]) if self.model.embed_levels else None


def _state_of(request: Request) -> SamplingState | None:
    return None if request.status is Status.DONE else request.sampling_state
