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
from gridsieve.common.contract.retention import NONE, ItemPruning, causal_slice_tokens, chosen_before_tower, num_kept
from gridsieve.common.contract.tensors import DType
from gridsieve.common.sealed_memory import SealedMemory
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.common.telemetry.metrics import busy
from gridsieve.common.telemetry.tracing import record, span
from gridsieve.services.compute.device import TORCH_DTYPES
from gridsieve.services.compute.transfers import Readback, beside
from gridsieve.services.encoder.items.cache import EmbedsCache
from gridsieve.services.encoder.items.cache_entry import CacheEntry, StageTimes
from gridsieve.services.encoder.items.decoded_slices import num_encoded
from gridsieve.services.encoder.items.pending_entry import Delivery, PendingEntry, encoding_bytes
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

    async def deliver(self, media_index: int, pending: PendingEntry) -> Delivery:
        """Begins to fill an entry that needs a delivery. Raises the stream's error if it has failed."""


class Item:
    """One media item of one request.

    output_bytes: limits embeddings that wait to be sent, over all requests. shares: its receiver takes shared memory.
    in_parts: its receiver takes it in parts. adapter: digest of the adapter that the tower computes with; empty: none.
    times: when an obtained item left each stage; the stages of a cached item begin when it joined its entry. reference:
    of an obtained item, what was last shown of each place, if that was asked for.
    """

    def __init__(
        self,
        media_index: int,
        plan: MediaPlan,
        pruning: ItemPruning,
        cache: EmbedsCache,
        output_bytes: ByteSemaphore,
        shares: bool,
        in_parts: bool,
        adapter: bytes,
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
        self._size_bytes = cache.tower.embeds_bytes(self._count)
        self._reserved = False
        self._joined: PendingEntry | CacheEntry | None = None  # of which the cache counts it as a waiter
        self._joined_ns = 0
        self._pending: PendingEntry | None = None  # unless its entry was there when it joined
        self._entry: CacheEntry | None = None
        self._delivery: Delivery | None = None  # of this request's stream to the entry
        self.times = StageTimes()
        self.repaired_frames = 0
        self.reference = b""
        every_token = self._count == plan.grid.tokens
        self._in_parts = in_parts and (self._chosen is not None or every_token or keeps_by_slice(pruning.method))
        self._parts: asyncio.Queue[Embeds] = asyncio.Queue()
        self._awaited = False  # whether the caller has sent all parts and waits for the next
        self._gathered_slices = 0

    @property
    def decoded_slices(self) -> int:
        return self._pending.decoded_slices if self._pending else self.plan.slices

    @property
    def encoded_slices(self) -> int:
        return self._pending.encoded_slices if self._pending else self.plan.slices

    async def start(self, stream: Stream, brought: Tensor | None) -> None:
        """Reserves output bytes and joins the item's entry; fills it from `stream` if no other stream does.

        brought: embeddings that came with the prompt, (1 + levels, tokens, D).
        Raises MediaRejected if the item can never fit, and the error of the stream if that has failed.
        """
        self._check_fits()
        await self._output_bytes.reserve(self._size_bytes)
        self._reserved = True
        self._joined_ns = monotonic_ns()
        if brought is not None:
            self._joined = await self._cache.bring(self.plan, brought)
        else:
            self._joined = self._cache.join(self.plan, self._chosen, self._adapter)
        if isinstance(self._joined, CacheEntry):
            self._entry = self._joined
            return
        self._pending = self._joined
        if self._pending.needs_delivery:
            await self._deliver(stream, self._pending)

    async def obtain(self, stream: Stream, progressed: Callable[[Item], None]) -> None:
        """Waits until the entry is complete and gathers the kept tokens, for `parts`. If another stream fails, `stream`
        fills it.

        progressed: called after every change. Raises the error of the entry, or of `stream` if that had to fill it.
        """
        if self._pending is not None:
            try:
                await self._complete(self._pending, stream, progressed)
            except BaseException as error:
                self._record_spans(self._pending, error)
                raise
            self._record_spans(self._pending, None)
        assert self._entry is not None
        if self._chosen:
            self._shrink(self._entry.embeds.shape[1])
        await self._add_part(self.plan.slices)
        add_request_stats(media=1, media_tokens_full=self.plan.grid.tokens, media_tokens=self._count)
        self._leave()

    async def parts(self) -> AsyncIterator[Embeds]:
        """Its parts, in order, each as soon as it is gathered; the caller asks for the next once it has sent one."""
        end = 0
        while end < self.plan.slices:
            self._awaited = True
            if self._pending:
                self._pending.notify()
            part = await self._parts.get()
            self._awaited = False
            end = part.slices[1]
            yield part

    async def wait_until_decoded(self) -> None:
        """Waits until this request need not select the item again: it is decoded, or its own stream brings the rest."""
        while self._joined and (pending := self._pending) and not pending.decoded:
            if self._delivery and self._delivery.active:
                return
            await pending.wait_for_change()

    def close(self) -> None:
        """Leaves the entry and releases the output bytes; may be called twice."""
        self._leave()
        self._parts = asyncio.Queue()
        if self._reserved:
            self._output_bytes.release(self._size_bytes)
            self._reserved = False

    async def _complete(self, pending: PendingEntry, stream: Stream, progressed: Callable[[Item], None]) -> None:
        """Waits for the entry, and gathers parts of it meanwhile."""
        while pending.entry is None:
            if pending.failure is not None:
                raise pending.failure
            if pending.needs_delivery:
                await self._deliver(stream, pending)
            elif self._part_is_due(pending):
                await self._add_part(pending.ready_slices)
            else:
                await pending.wait_for_change()
            progressed(self)
        self._entry = pending.entry

    def _part_is_due(self, pending: PendingEntry) -> bool:
        if not (self._in_parts and self._awaited and pending.in_parts and self._parts.empty()):
            return False
        start, end = self._gathered_slices, pending.ready_slices
        return end < self.plan.slices and self._num_kept(pending, start, end) >= _PART_TOKENS

    def _num_kept(self, pending: PendingEntry, start: int, end: int) -> int:
        """How many tokens are kept of slices [start, end) that are encoded."""
        encoded = pending.slices.rows_before(end) - pending.slices.rows_before(start)
        if self._chosen or self._count == self.plan.grid.tokens or start == end:
            return encoded
        grid, each = self.plan.grid, causal_slice_tokens(self.plan.grid, self.pruning.rate)
        return each * (end - start) + (0 if start else grid.slice_tokens - each)

    async def _add_part(self, end: int) -> None:
        start, self._gathered_slices = self._gathered_slices, end
        with self._cache.batcher.ending_on_device_errors():
            self._parts.put_nowait(await asyncio.to_thread(self._gather, self._entry, start, end))

    async def _deliver(self, stream: Stream, pending: PendingEntry) -> None:
        self._delivery = await stream.deliver(self.media_index, pending)
        pending.notify()  # `wait_until_decoded` waits for this

    def _shrink(self, count: int) -> None:
        """Releases the bytes of tokens that were not chosen."""
        size_bytes = self._cache.tower.embeds_bytes(count)
        self._output_bytes.release(self._size_bytes - size_bytes)
        self._count, self._size_bytes = count, size_bytes

    def _leave(self) -> None:
        joined, self._joined, self._entry = self._joined, None, None
        if joined is not None:
            self._cache.leave(joined)

    def _check_fits(self) -> None:
        tower, limit_bytes = self._cache.tower, self._cache.encoding_bytes.size_bytes
        tokens = num_encoded(self.plan, self._chosen)
        size_bytes = encoding_bytes(tower, self.plan, self._chosen)
        if size_bytes > limit_bytes:
            raise MediaRejected(
                f"media {self.media_index} becomes {tokens} tokens, {size_bytes} bytes of embeddings; the encoder has "
                f"room for {limit_bytes} bytes, {limit_bytes // tower.embeds_bytes(1)} tokens",
                value=size_bytes,
                limit=limit_bytes,
                remedy=_remedy(self.plan),
            )

    @property
    def _span_attributes(self) -> dict[str, int]:
        return {"media_index": self.media_index, "media_tokens_full": self.plan.grid.tokens}

    def _record_spans(self, pending: PendingEntry, error: BaseException | None) -> None:
        """Records the spans of queueing and encoding; none if the entry was complete when the item joined it."""
        ended_ns = self._entry.times.encoded_ns if self._entry else monotonic_ns()
        if pending.queued_ns is None or ended_ns <= self._joined_ns:
            return
        queued_ns, entered_ns = max(pending.queued_ns, self._joined_ns), pending.entered_ns
        if entered_ns is None:
            record("wait_for_encoder", queued_ns, ended_ns, error, **self._span_attributes)
            return
        if entered_ns > queued_ns:
            record("wait_for_encoder", queued_ns, entered_ns, None, **self._span_attributes)
        record("encode", max(entered_ns, queued_ns), ended_ns, error, **self._span_attributes)

    @torch.inference_mode()
    def _gather(self, entry: CacheEntry | None, start: int, end: int) -> Embeds:
        """The kept tokens of slices [start, end), on the host; sent uncopied if all are kept.

        entry: of the item, if they are its last slices.
        """
        prunes = self._count < self.plan.grid.tokens
        grid, pending = self.plan.grid, self._pending
        if entry is not None and not start:
            encoding, embeds, indices = entry.encoding, entry.embeds, entry.kept
        else:
            assert pending is not None
            encoding, (embeds, indices) = pending.encoding, pending.part(start, end)
        how = {"method": self.pruning.method, "rate": self.pruning.rate} if prunes else {"method": NONE}
        tokens = {**self._span_attributes, "media_tokens": self._count}
        # `device_of`: the current device of a new thread is cuda:0.
        tracing = span("prune", **tokens, **how)
        with torch.cuda.device_of(embeds), beside(embeds.device, "prune"), busy("prune"), tracing:
            kept = None
            if not prunes or self._chosen:
                pass
            elif entry is not None and not start:
                with entry.scoring:
                    kept = keep_tokens(embeds[0], grid, self.pruning, entry.scores)
            elif pending is not None and self._num_kept(pending, start, end) < embeds.shape[1]:
                scored, _ = pending.part(max(0, start - 1), end)
                kept = keep_part(scored[0], grid, self.pruning, start)
            rows = None if kept is None else kept - start * grid.slice_tokens
            shape = (len(embeds), embeds.shape[1] if rows is None else len(rows), embeds.shape[2])
            memory, data = None, None
            with suppress(OSError):  # the machine lacks descriptors or memory
                if self._shares and shape[1]:
                    memory = in_shared_memory(embeds, rows)
                    data = memory.mapped(self._cache.tower.embeds_bytes(shape[1])).data
            if data is None:
                memory, data = None, _bytes_of((embeds if rows is None else embeds[:, rows.long()]).contiguous())
            if kept is not None:
                indices = Readback(kept).wait()[0].numpy()
        if entry is not None:
            count_item(self.plan, self.pruning, self._count)
            self.repaired_frames, self.reference = entry.repaired_frames, entry.reference
            begun_ns = max(self._joined_ns, entry.times.begun_ns)
            self.times = replace(entry.times, begun_ns=begun_ns, pruned_ns=monotonic_ns())
        return Embeds(encoding, (start, end), indices, _DTYPES[embeds.dtype], shape, data, memory)


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
    if plan.modality is Modality.AUDIO:
        return "set `frame_sampling.start_s` and `frame_sampling.end_s`"
    height, width = plan.frames.size_px
    pixels = f"`frame_sampling.max_pixels` (now {height}×{width} a frame)"
    if plan.modality is Modality.IMAGE:
        return "send a smaller picture" if plan.fixed_tokens else f"lower {pixels}"
    frames = (
        f"lower `frame_sampling.fps` or `frame_sampling.max_frames` (now {plan.frames.count // plan.pictures} frames)"
    )
    return frames if plan.fixed_tokens else f"{frames}, or {pixels}"
