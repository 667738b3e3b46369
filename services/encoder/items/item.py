"""One media item of one request: room for what is sent of it, its share of an entry, and which of its tokens are kept.

    start ──────────────────────────▶ obtain ──────────────────▶ close
    (room for K; the entry is led     (complete: gathered, and   (room is free again)
     by this request or another)       the entry is left)

Room is taken before the entry is joined, and the entry is read as soon as it is complete, however slow the caller
reads: nobody who holds an entry waits for anything but the entry. It knows no gRPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import monotonic_ns

import torch
from torch import Tensor

from common.byte_semaphore import ByteSemaphore
from common.contract.errors import MediaRejected
from common.contract.plan import Int32Array, MediaPlan, Modality
from common.contract.retention import NONE, Pruning, retained_count
from common.contract.tensors import DType
from common.telemetry.metrics import busy
from common.telemetry.logs import add_request_stats
from common.telemetry.tracing import record, span
from services.encoder.items.cache import EmbedsCache, Entry, Source
from services.encoder.items.encoding import Encoding, Moments, embeds_bytes
from services.encoder.metrics import count_item
from services.encoder.pruning.methods import keep_tokens
from services.encoder.tower.readback import Readback

_DTYPES = {torch.float32: DType.FLOAT32, torch.bfloat16: DType.BFLOAT16, torch.float16: DType.FLOAT16}


@dataclass(frozen=True, slots=True, eq=False)
class Embeds:
    """What is sent of one item: kept, int32 [K] (None: every token), and its embeddings [1 + levels, K, D] as bytes."""

    kept: Int32Array | None
    dtype: DType
    shape: tuple[int, int, int]
    data: memoryview


class Item:
    """One media item of one request, from its reservation to its release. outputs: room for what waits to be sent."""

    def __init__(
        self, media_index: int, plan: MediaPlan, pruning: Pruning, cache: EmbedsCache, outputs: ByteSemaphore
    ) -> None:
        self.media_index = media_index
        self.plan = plan
        self._pruning = pruning
        self._cache = cache
        self._outputs = outputs
        self._count = retained_count(plan.grid, pruning, plan.modality)
        self._output_bytes = embeds_bytes(cache.tower, self._count)
        self._reserved = False
        self._joined_ns = 0
        self._pruned_ns = 0
        self._entry: Entry | None = None
        self._encoding: Encoding | None = None
        self._embeds: Embeds | None = None

    @property
    def embeds(self) -> Embeds:
        """What is to be sent, once it is obtained and until it is closed."""
        assert self._embeds is not None
        return self._embeds

    @property
    def moments(self) -> Moments:
        """When an obtained item left each stage; one that was made before had begun as soon as there was room."""
        assert self._encoding is not None
        moments = self._encoding.moments
        return replace(moments, begun_ns=max(self._joined_ns, moments.begun_ns), pruned_ns=self._pruned_ns)

    @property
    def _told(self) -> dict[str, int]:
        """What traces tell of it."""
        return {"media_index": self.media_index, "media_tokens_full": self.plan.grid.tokens}

    @property
    def decoded_slices(self) -> int:
        return self._encoding.decoded_slices if self._encoding else 0

    @property
    def encoded_slices(self) -> int:
        return self._encoding.encoded_slices if self._encoding else 0

    @property
    def repaired_frames(self) -> int:
        return self._encoding.repaired_frames if self._encoding else 0

    async def start(self, source: Source, brought: Tensor | None) -> None:
        """Returns once the item is sure to come: kept, led by another, brought, or with room and selected.

        brought: its embeddings, (1 + levels, tokens, D), where the prompt had them.
        Raises MediaRejected if it can never fit, and what the source has failed by.
        """
        self._check_fits()
        await self._outputs.reserve(self._output_bytes)
        self._reserved = True
        self._entry = self._cache.join(self.plan) if brought is None else self._cache.alone(self.plan)
        self._encoding = self._entry.encoding
        self._joined_ns = monotonic_ns()
        if brought is not None:
            await self._encoding.reserve()
            await self._encoding.fill(brought)
        elif self._unled(self._entry):
            await self._entry.lead(source, self.media_index)

    async def obtain(self, source: Source, progressed: Callable[[Item], None]) -> None:
        """Waits until the entry is complete, and gathers. Raises what failed it, or the source if it had to lead."""
        entry = self._entry
        assert entry is not None
        try:
            await self._complete(entry, source, progressed)
        except BaseException as error:
            self._record_encoding(entry.encoding, error)
            raise
        self._record_encoding(entry.encoding, None)
        self._embeds = await asyncio.to_thread(self._gather, entry, entry.encoding.embeds)
        add_request_stats(media=1, media_tokens_full=self.plan.grid.tokens, media_tokens=self._count)
        self._leave()

    async def _complete(self, entry: Entry, source: Source, progressed: Callable[[Item], None]) -> None:
        while not entry.encoding.complete:
            if entry.encoding.failure is not None:
                raise entry.encoding.failure
            if self._unled(entry):
                await entry.lead(source, self.media_index)
            else:
                await entry.encoding.changed()
            progressed(self)

    async def settled(self, source: Source) -> None:
        """Waits until the item has no more use for its request's stream than to get what was selected from it."""
        while (entry := self._entry) and entry.encoding.decoded_slices < self.plan.grid.t and not source.brings(entry):
            await entry.encoding.changed()

    def close(self) -> None:
        """Leaves the entry and gives the room back; safe to call again."""
        self._leave()
        self._embeds = None
        if self._reserved:
            self._outputs.release(self._output_bytes)
            self._reserved = False

    def _check_fits(self) -> None:
        tower, room_bytes = self._cache.tower, self._cache.room.size_bytes
        size_bytes = embeds_bytes(tower, self.plan.grid.tokens)
        if size_bytes > room_bytes:
            raise MediaRejected(
                f"media {self.media_index} becomes {self.plan.grid.tokens} tokens, {size_bytes} bytes of embeddings; "
                f"the encoder has room for {room_bytes} bytes, {room_bytes // embeds_bytes(tower, 1)} tokens: "
                f"{_remedy(self.plan)}"
            )

    def _unled(self, entry: Entry) -> bool:
        """Whether its slices have nowhere to come from."""
        encoding = entry.encoding
        return entry.source is None and encoding.failure is None and encoding.decoded_slices < self.plan.grid.t

    def _leave(self) -> None:
        if self._entry is not None:
            entry, self._entry = self._entry, None
            self._cache.leave(entry)

    def _record_encoding(self, encoding: Encoding, error: BaseException | None) -> None:
        """Of what was made before, or came with the prompt, there is nothing to tell."""
        ended_ns = encoding.moments.encoded_ns if error is None else monotonic_ns()
        if encoding.queued_ns is None or ended_ns <= self._joined_ns:
            return
        queued_ns, entered_ns = max(encoding.queued_ns, self._joined_ns), encoding.entered_ns
        if entered_ns is None:
            record("wait_for_encoder", queued_ns, ended_ns, error, **self._told)
            return
        if entered_ns > queued_ns:
            record("wait_for_encoder", queued_ns, entered_ns, None, **self._told)
        record("encode", max(entered_ns, queued_ns), ended_ns, error, **self._told)

    @torch.inference_mode()
    def _gather(self, entry: Entry, embeds: Tensor) -> Embeds:
        """embeds: (1 + levels, tokens, D), which others read as well; where all is kept, it is sent itself."""
        prunes = self._count < self.plan.grid.tokens
        how = {"method": self._pruning.method, "rate": self._pruning.rate} if prunes else {"method": NONE}
        with torch.cuda.device_of(embeds), busy("prune"), span("prune", **self._told, media_tokens=self._count, **how):
            wanted = [embeds]
            if prunes:
                kept = keep_tokens(embeds[0], self.plan.grid, self._pruning, entry.scores)
                wanted = [embeds[:, kept.long()], kept]
            embeds, *indices = Readback(*wanted).wait()
        count_item(self.plan, self._pruning, self._count)
        self._pruned_ns = monotonic_ns()
        levels, count, width = embeds.shape
        return Embeds(
            kept=indices[0].numpy() if indices else None,
            dtype=_DTYPES[embeds.dtype],
            shape=(levels, count, width),
            data=embeds.view(torch.uint8).numpy().data,
        )


def _remedy(plan: MediaPlan) -> str:
    """Which fields make an item smaller, and what they have come to."""
    if plan.brings_embeds:
        return f"bring fewer than the {plan.grid} of embeds.grid"
    pixels = f"max_pixels (now {plan.frame_height_px}×{plan.frame_width_px} a frame)"
    if plan.modality is Modality.IMAGE:
        return f"lower {pixels}"
    return f"lower fps or max_frames (now {plan.frames} frames), or {pixels}"
