"""One media item of one request: output bytes, its share of a cache entry, and which of its tokens are kept.

    start ──────────────────────────▶ obtain ──────────────────▶ close
    (output bytes for K tokens; the    (entry complete: gathered,   (output bytes
     entry gets a delivery)             entry left)                  released)

    slices of the entry:  [0 .. 3)[3 .. 7)[7 ............. 12)
    parts:                first   second   last: all that is left once the entry is complete

Output bytes are reserved before the entry is joined, and what is left of the entry is gathered as soon as it is
complete, however slowly the caller reads. So a holder of an entry waits for nothing but the entry, and requests cannot
deadlock. Before that, a part is gathered only when the one before it is sent, so that a fast tower makes few of them.
It knows no gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from time import monotonic_ns
from typing import Protocol

import torch
from torch import Tensor

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract.errors import MediaRejected
from gridsieve.common.contract.plan import Int32Array, MediaPlan, Modality
from gridsieve.common.contract.retention import NONE, Pruning, causal_slice_tokens, chosen_before_tower, num_kept
from gridsieve.common.contract.tensors import DType
from gridsieve.common.sealed_memory import SealedMemory
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.common.telemetry.metrics import busy
from gridsieve.common.telemetry.tracing import record, span
from gridsieve.services.compute.device import TORCH_DTYPES
from gridsieve.services.compute.transfers import Readback, beside
from gridsieve.services.encoder.items.cache import EmbedsCache
from gridsieve.services.encoder.items.cache_entry import (
    CacheEntry,
    Delivery,
    StageTimes,
    embeds_bytes,
    encoding_bytes,
)
from gridsieve.services.encoder.items.decoded_slices import num_encoded
from gridsieve.services.encoder.metrics import count_item
from gridsieve.services.encoder.pruning.methods import keep_part, keep_tokens, keeps_by_slice

_BLOCK_BYTES = 2**20
# Kept tokens that a part has at least, unless it is the last one: fewer cost a step of the language model more than
# they save.
_PART_TOKENS = 256

_DTYPES = {dtype: wire for wire, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Embeds:
    """A part of an item: kept, int32 [K] (None: all tokens), and embeddings [1 + levels, K, D] as bytes.

    encoding: the name of the encoding. slices: [start, end) of the grid. memory: holds the bytes, if it can be handed
    over to the receiver.
    """

    encoding: bytes
    slices: tuple[int, int]
    kept: Int32Array | None
    dtype: DType
    shape: tuple[int, int, int]
    data: memoryview
    memory: SealedMemory | None


class Stream(Protocol):
    """Where the slices of one request's items come from."""

    async def deliver(self, media_index: int, entry: CacheEntry) -> Delivery:
        """Begins to fill an entry that needs a delivery. Raises the stream's error if it has failed."""


class Item:
    """One media item of one request.

    output_bytes: limits embeddings that wait to be sent, over all requests. shares: its receiver takes shared memory.
    in_parts: its receiver takes it in parts. adapter: digest of the one that it is encoded with; empty: none.
    """

    def __init__(
        self,
        media_index: int,
        plan: MediaPlan,
        pruning: Pruning,
        cache: EmbedsCache,
        output_bytes: ByteSemaphore,
        shares: bool = False,
        in_parts: bool = False,
        adapter: bytes = b"",
    ) -> None:
        self.media_index = media_index
        self.plan = plan
        self.pruning = pruning
        self._cache = cache
        self._output_bytes = output_bytes
        self._shares = shares
        self._adapter = adapter
        self._chosen = pruning if chosen_before_tower(plan.grid, pruning, plan.modality) else None
        self._count = num_kept(plan.grid, pruning, plan.modality)  # at most, until it is obtained
        self._size_bytes = embeds_bytes(cache.tower, self._count)
        self._reserved = False
        self._joined = False  # whether the cache counts it as a waiter of its entry
        self._joined_ns = 0
        self._pruned_ns = 0
        self._entry: CacheEntry | None = None
        self._delivery: Delivery | None = None  # of this request's stream to the entry
        every_token = self._count == plan.grid.tokens
        self._in_parts = in_parts and (self._chosen is not None or every_token or keeps_by_slice(pruning.method))
        self._parts: asyncio.Queue[Embeds] = asyncio.Queue()
        self._awaited = False  # whether the caller has sent all parts and waits for the next
        self._gathered_slices = 0

    @property
    def times(self) -> StageTimes:
        """When an obtained item left each stage; one that was cached begins when it joined its entry."""
        assert self._entry is not None
        times = self._entry.times
        return replace(times, begun_ns=max(self._joined_ns, times.begun_ns), pruned_ns=self._pruned_ns)

    @property
    def decoded_slices(self) -> int:
        return self._entry.decoded_slices if self._entry else 0

    @property
    def encoded_slices(self) -> int:
        return self._entry.encoded_slices if self._entry else 0

    @property
    def repaired_frames(self) -> int:
        return self._entry.repaired_frames if self._entry else 0

    @property
    def reference(self) -> bytes:
        """What was last shown of each place, once it is decoded, if it was asked for."""
        return self._entry.slices.reference if self._entry else b""

    async def start(self, stream: Stream, brought: Tensor | None) -> None:
        """Reserves output bytes and joins the item's entry; fills it from `stream` if no other stream does.

        brought: embeddings that came with the prompt, (1 + levels, tokens, D).
        Raises MediaRejected if the item can never fit, and the error of the stream if that has failed.
        """
        self._check_fits()
        await self._output_bytes.reserve(self._size_bytes)
        self._reserved = True
        cache = self._cache
        if brought is None:
            self._entry = cache.join(self.plan, self._chosen, self._adapter)
        else:
            self._entry = cache.join_unshared(self.plan)
        self._joined, self._joined_ns = True, monotonic_ns()
        if brought is not None:
            await self._entry.reserve()
            await self._entry.fill(brought)
        elif self._entry.needs_delivery:
            await self._deliver(stream, self._entry)

    async def obtain(self, stream: Stream, progressed: Callable[[Item], None]) -> None:
        """Waits until the entry is complete and gathers the kept tokens, for `parts`. If another stream fails, `stream`
        fills it.

        progressed: called after every change. Raises the error of the entry, or of `stream` if that had to fill it.
        """
        entry = self._entry
        assert entry is not None
        try:
            await self._complete(entry, stream, progressed)
        except BaseException as error:
            self._record_spans(entry, error)
            raise
        self._record_spans(entry, None)
        if self._chosen:
            self._shrink(entry.tokens)
        await self._add_part(entry, self.plan.slices)
        add_request_stats(media=1, media_tokens_full=self.plan.grid.tokens, media_tokens=self._count)
        self._leave()

    async def parts(self) -> AsyncIterator[Embeds]:
        """Its parts, in order, each as soon as it is gathered; the caller asks for the next once it has sent one."""
        assert self._entry is not None
        end = 0
        while end < self.plan.slices:
            self._awaited = True
            self._entry.notify()
            part = await self._parts.get()
            self._awaited = False
            end = part.slices[1]
            yield part

    async def wait_until_decoded(self) -> None:
        """Waits until this request need not select the item again: it is decoded, or its own stream brings the rest."""
        while self._joined and (entry := self._entry) and not entry.decoded:
            if self._delivery and self._delivery.active:
                return
            await entry.wait_for_change()

    def close(self) -> None:
        """Leaves the entry and releases the output bytes; may be called twice."""
        self._leave()
        self._parts = asyncio.Queue()
        if self._reserved:
            self._output_bytes.release(self._size_bytes)
            self._reserved = False

    async def _complete(self, entry: CacheEntry, stream: Stream, progressed: Callable[[Item], None]) -> None:
        while not entry.complete:
            if entry.failure is not None:
                raise entry.failure
            if entry.needs_delivery:
                await self._deliver(stream, entry)
            elif self._part_is_due(entry):
                await self._add_part(entry, entry.ready_slices)
            else:
                await entry.wait_for_change()
            progressed(self)

    def _part_is_due(self, entry: CacheEntry) -> bool:
        if not (self._in_parts and self._awaited and entry.in_parts and self._parts.empty()):
            return False
        return self._num_kept(entry, self._gathered_slices, entry.ready_slices) >= _PART_TOKENS

    def _num_kept(self, entry: CacheEntry, start: int, end: int) -> int:
        """How many tokens are kept of slices [start, end) that are encoded."""
        encoded = entry.slices.rows_before(end) - entry.slices.rows_before(start)
        if self._chosen or self._count == self.plan.grid.tokens or start == end:
            return encoded
        grid, each = self.plan.grid, causal_slice_tokens(self.plan.grid, self.pruning.rate)
        return each * (end - start) + (0 if start else grid.slice_tokens - each)

    async def _add_part(self, entry: CacheEntry, end: int) -> None:
        start, self._gathered_slices = self._gathered_slices, end
        with entry.batcher.ending_on_device_errors():
            self._parts.put_nowait(await asyncio.to_thread(self._gather, entry, start, end))

    async def _deliver(self, stream: Stream, entry: CacheEntry) -> None:
        self._delivery = await stream.deliver(self.media_index, entry)
        entry.notify()  # `wait_until_decoded` waits for this

    def _shrink(self, count: int) -> None:
        """Releases the bytes of tokens that were not chosen."""
        size_bytes = embeds_bytes(self._cache.tower, count)
        self._output_bytes.release(self._size_bytes - size_bytes)
        self._count, self._size_bytes = count, size_bytes

    def _leave(self) -> None:
        if self._joined and self._entry is not None:
            self._joined = False
            self._cache.leave(self._entry)

    def _check_fits(self) -> None:
        tower, limit_bytes = self._cache.tower, self._cache.encoding_bytes.size_bytes
        tokens = num_encoded(self.plan, self._chosen)
        size_bytes = encoding_bytes(tower, self.plan, self._chosen)
        if size_bytes > limit_bytes:
            raise MediaRejected(
                f"media {self.media_index} becomes {tokens} tokens, {size_bytes} bytes of embeddings; the encoder has "
                f"room for {limit_bytes} bytes, {limit_bytes // embeds_bytes(tower, 1)} tokens",
                value=size_bytes,
                limit=limit_bytes,
                remedy=_remedy(self.plan),
            )

    @property
    def _span_attributes(self) -> dict[str, int]:
        return {"media_index": self.media_index, "media_tokens_full": self.plan.grid.tokens}

    def _record_spans(self, entry: CacheEntry, error: BaseException | None) -> None:
        """Records the spans of queueing and encoding; none if the entry was complete, or brought, when it joined."""
        ended_ns = entry.times.encoded_ns if error is None else monotonic_ns()
        if entry.queued_ns is None or ended_ns <= self._joined_ns:
            return
        queued_ns, entered_ns = max(entry.queued_ns, self._joined_ns), entry.entered_ns
        if entered_ns is None:
            record("wait_for_encoder", queued_ns, ended_ns, error, **self._span_attributes)
            return
        if entered_ns > queued_ns:
            record("wait_for_encoder", queued_ns, entered_ns, None, **self._span_attributes)
        record("encode", max(entered_ns, queued_ns), ended_ns, error, **self._span_attributes)

    @torch.inference_mode()
    def _gather(self, entry: CacheEntry, start: int, end: int) -> Embeds:
        """The kept tokens of slices [start, end), on the host; sent uncopied if all are kept."""
        prunes = self._count < self.plan.grid.tokens
        grid, whole, last = self.plan.grid, end - start == self.plan.slices, end == self.plan.slices
        embeds, indices = (entry.embeds, entry.kept) if whole else entry.part(start, end)
        how = {"method": self.pruning.method, "rate": self.pruning.rate} if prunes else {"method": NONE}
        tokens = {**self._span_attributes, "media_tokens": self._count}
        # `device_of`: the current device of a new thread is cuda:0.
        tracing = span("prune", **tokens, **how)
        with torch.cuda.device_of(embeds), beside(embeds.device, "prune"), busy("prune"), tracing:
            kept = None
            if self._chosen:
                if last:
                    entry.trim()
                    embeds, indices = (entry.embeds, entry.kept) if whole else entry.part(start, end)
            elif whole and prunes:
                with entry.scoring:
                    kept = keep_tokens(embeds[0], grid, self.pruning, entry.scores)
            elif prunes and self._num_kept(entry, start, end) < embeds.shape[1]:
                scored, _ = entry.part(max(0, start - 1), end)
                kept = keep_part(scored[0], grid, self.pruning, start)
            rows = None if kept is None else kept - start * grid.slice_tokens
            shape = (len(embeds), embeds.shape[1] if rows is None else len(rows), embeds.shape[2])
            memory, data = None, None
            with suppress(OSError):  # the machine lacks descriptors or memory
                if self._shares and shape[1]:
                    memory = in_shared_memory(embeds, rows)
                    data = memory.mapped(embeds_bytes(self._cache.tower, shape[1])).data
            if data is None:
                memory, data = None, _bytes_of((embeds if rows is None else embeds[:, rows.long()]).contiguous())
            if kept is not None:
                indices = Readback(kept).wait()[0].numpy()
        if last:
            count_item(self.plan, self.pruning, self._count)
            self._pruned_ns = monotonic_ns()
        return Embeds(entry.encoding, (start, end), indices, _DTYPES[embeds.dtype], shape, data, memory)


def in_shared_memory(embeds: Tensor, kept: Tensor | None) -> SealedMemory:
    """The kept tokens of embeddings (1 + levels, tokens, D). Raises OSError without descriptors or memory.

    On the CPU they are gathered in blocks that stay in its cache until they are written, by numpy: torch's threads
    would wait for each other after each block.
    """
    memory = SealedMemory()
    for level in embeds:
        if kept is None or not embeds.is_cpu:
            memory.write(_bytes_of(level if kept is None else level[kept.long()]))
            continue
        rows, indices = level.view(torch.uint8).numpy(), kept.numpy()
        step = max(1, _BLOCK_BYTES // rows.shape[1])
        for start in range(0, len(indices), step):
            memory.write(rows.take(indices[start : start + step], axis=0).data)
    memory.seal()
    return memory


def _bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the host, once they are there."""
    if not tensor.numel():
        return memoryview(b"")
    return Readback(tensor).wait()[0].view(torch.uint8).numpy().data


def _remedy(plan: MediaPlan) -> str:
    """Which request fields make the item smaller, and their effect so far."""
    if plan.brings_embeds:
        return f"send fewer tokens than the {plan.grid} of embeds.grid"
    height, width = plan.frames.size_px
    pixels = f"`frame_sampling.max_pixels` (now {height}×{width} a frame)"
    if plan.modality is Modality.IMAGE:
        return "send a smaller picture" if plan.fixed_tokens else f"lower {pixels}"
    frames = (
        f"lower `frame_sampling.fps` or `frame_sampling.max_frames` (now {plan.frames.count // plan.pictures} frames)"
    )
    return frames if plan.fixed_tokens else f"{frames}, or {pixels}"
