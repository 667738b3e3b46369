"""One selected media item: room for its embeddings, its slices through the tower, and which of its tokens are kept.

    reserve ──▶ add add add … ──▶ encoded ──▶ finish ──▶ close
    (room)      (a slice each)    (tower)     (prune)    (room is free again)
          └───▶ fill ────────────────────────▲
                (embeddings that came with the prompt)

It knows neither gRPC nor where frames come from. It belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np
import torch
from prometheus_client import Counter, Gauge
from torch import Tensor

from common.errors import MediaRejected
from common.plan import Int32Array, MediaPlan, Modality
from common.retention import NONE, Pruning, retained_count
from common.room import Room
from common.telemetry import busy
from common.tensors import DType, TensorBuffer
from services.encoder.batcher import Batcher
from services.encoder.pruning import gather_in_place, keep_tokens
from services.encoder.tower import Tower

RESERVED_BYTES = Gauge("framesieve_encoder_reserved_bytes", "Bytes of the output buffer that items hold")
ITEMS = Counter(
    "framesieve_encoder_items_total", "Media items that were encoded, or brought their embeddings", ["modality"]
)
TOKENS = Counter("framesieve_encoder_tokens_total", "Tokens of these items", ["pruning", "method"])

# So many forwards' worth of an item's slices may wait for the tower; more wait with the decoder.
_FORWARDS_AHEAD = 2

_DTYPES = {torch.float32: DType.FLOAT32, torch.bfloat16: DType.BFLOAT16}


@dataclass(frozen=True, slots=True, eq=False)
class Embeds:
    """What is sent of one item: kept, int32 [K] (None: every token), and its embeddings [1 + levels, K, D] as bytes."""

    kept: Int32Array | None
    dtype: DType
    shape: tuple[int, int, int]
    data: memoryview


class Item:
    """One media item of one request, from its reservation to its release."""

    def __init__(self, media_index: int, plan: MediaPlan, pruning: Pruning, tower: Tower, batcher: Batcher) -> None:
        self.media_index = media_index
        self.plan = plan
        self.decoded_slices = 0
        self.encoded_slices = 0
        self.repaired_frames = 0
        self._pruning = pruning
        self._tower = tower
        self._batcher = batcher
        self._shape = (1 + tower.embed_levels, plan.grid.tokens, tower.embed_dim)
        self._room: Room | None = None
        self._buffer: Tensor | None = None
        self._slices: list[asyncio.Future[None]] = []
        self._failure: BaseException | None = None
        self._ahead = asyncio.Semaphore(max(1, _FORWARDS_AHEAD * batcher.budget_tokens // plan.grid.slice_tokens))
        self._changed = asyncio.Event()

    @property
    def size_bytes(self) -> int:
        levels, tokens, width = self._shape
        return levels * tokens * width * self._tower.dtype.itemsize

    async def reserve(self, room: Room) -> None:
        """Waits for room for the whole item, unpruned. Raises MediaRejected if it can never fit."""
        if self.size_bytes > room.size_bytes:
            remedy = "bring fewer tokens" if self.plan.brings_embeds else "lower fps, max_frames or max_pixels"
            raise MediaRejected(
                f"media {self.media_index} becomes {self.plan.grid.tokens} tokens, {self.size_bytes} bytes of "
                f"embeddings; the encoder has room for {room.size_bytes}: {remedy}"
            )
        with busy("wait_for_room"):
            await room.reserve(self.size_bytes)
        self._room = room
        RESERVED_BYTES.inc(self.size_bytes)
        self._buffer = torch.empty(self._shape, dtype=self._tower.dtype, device=self._tower.device)

    async def add(self, frames: TensorBuffer, repaired_frames: int) -> None:
        """Takes the item's next slice; waits while enough of them are ahead in the batcher's queue."""
        assert self._buffer is not None
        self.repaired_frames += repaired_frames
        start = self.decoded_slices * self.plan.grid.slice_tokens
        self.decoded_slices += 1
        pixels = torch.frombuffer(frames.data, dtype=torch.uint8).view(frames.shape)
        await self._ahead.acquire()
        target = self._buffer[:, start : start + self.plan.grid.slice_tokens]
        encoded = asyncio.wrap_future(self._batcher.submit(pixels, target))
        encoded.add_done_callback(self._slice_done)
        self._slices.append(encoded)

    async def fill(self, embeds: Tensor) -> None:
        """Takes all of its embeddings, (1 + levels, tokens, D) of any float dtype, in place of slices."""
        assert self._buffer is not None
        await asyncio.to_thread(self._buffer.copy_, embeds)
        self.decoded_slices = self.encoded_slices = self.plan.grid.t
        self._changed.set()

    async def next_encoded(self) -> bool:
        """Waits until more slices are encoded; whether all of them are. Raises what the tower raised."""
        await self._changed.wait()
        self._changed.clear()
        if self._failure is not None:
            raise self._failure
        return self.encoded_slices == self.plan.grid.t

    async def finish(self) -> Embeds:
        """Prunes, once every slice is encoded."""
        return await asyncio.to_thread(self._finish)

    def close(self) -> None:
        """Takes what waits for the tower out of its queue, and gives the room back; safe to call again."""
        for encoded in self._slices:
            encoded.cancel()
        self._slices.clear()
        self._buffer = None
        if self._room is not None:
            RESERVED_BYTES.dec(self.size_bytes)
            self._room.release(self.size_bytes)
            self._room = None

    def _slice_done(self, encoded: asyncio.Future[None]) -> None:
        self._ahead.release()
        if not encoded.cancelled():
            self._failure = self._failure or encoded.exception()
            self.encoded_slices += 1
        self._changed.set()

    @torch.inference_mode()
    def _finish(self) -> Embeds:
        buffer = self._buffer
        assert buffer is not None
        levels, tokens, width = self._shape
        with busy("prune"):
            count = retained_count(self.plan.grid, self._pruning, self.plan.modality)
            kept: Tensor | None = None
            rows = buffer.view(levels * tokens, width)
            if count < tokens:
                kept = keep_tokens(buffer[0], self.plan.grid, self._pruning)
                rows = gather_in_place(buffer, kept)
            rows = rows.cpu()
        self._count(count)
        return Embeds(
            kept=None if kept is None else kept.cpu().numpy().astype(np.int32, copy=False),
            dtype=_DTYPES[self._tower.dtype],
            shape=(levels, count, width),
            data=rows.view(torch.uint8).numpy().data,
        )

    def _count(self, kept: int) -> None:
        ITEMS.labels(self.plan.modality.value).inc()
        pruned = self.plan.modality is Modality.VIDEO and self._pruning.rate
        method = self._pruning.method if pruned else NONE
        TOKENS.labels("before", method).inc(self.plan.grid.tokens)
        TOKENS.labels("after", method).inc(kept)
