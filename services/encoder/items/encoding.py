"""The unpruned embeddings of one media item: room for them, and its slices through the tower.

    reserve ──▶ add add add … ──▶ complete ──▶ close
    (room)      (a slice each)    (tower)      (room is free again)
          └───▶ fill ────────────▲
                (embeddings that came with the prompt)

It knows neither gRPC, nor where frames come from, nor who waits for it. It belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from time import monotonic_ns

import torch
from torch import Tensor

from common.byte_semaphore import ByteSemaphore
from common.contract.errors import Unavailable
from common.contract.plan import MediaPlan
from common.contract.tensors import TensorBuffer
from services.encoder.items.batcher import Batcher, Forward
from services.encoder.tower.tower import Tower

# So many forwards' worth of an item's slices may wait for the tower; more wait with the decoder.
_FORWARDS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class FrameSlice:
    """One temporal slice of an item, whole: UINT8 [frames, height, width, 3]. index: its place in the item's grid.

    decoded_ns, resized_ns: when its last frame was, on this host's monotonic clock.
    """

    media_index: int
    index: int
    frames: TensorBuffer
    repaired_frames: int
    decoded_ns: int
    resized_ns: int


@dataclass(slots=True)
class Moments:
    """When the last of an item's slices left each stage, on this host's monotonic clock; None: it was never there.

    begun_ns: the tower had begun with it. pruned_ns is a requested item's own.
    """

    decoded_ns: int | None = None
    resized_ns: int | None = None
    begun_ns: int = 0
    encoded_ns: int = 0
    pruned_ns: int = 0


class Encoding:
    """One media item from the reservation of its buffer, (1 + levels, tokens, D), to its release.

    Counts of slices never fall, and `failure` is what the tower raised, or what `fail` was told.
    """

    def __init__(self, plan: MediaPlan, tower: Tower, batcher: Batcher, room: ByteSemaphore) -> None:
        self.plan = plan
        self.decoded_slices = 0
        self.encoded_slices = 0
        self.repaired_frames = 0
        self.moments = Moments()
        self.queued_ns: int | None = None  # when its first slice began to wait for the tower
        self.entered_ns: int | None = None  # when the tower began with the first
        self.failure: BaseException | None = None
        self._shape = (1 + tower.embed_levels, plan.grid.tokens, tower.embed_dim)
        self._tower = tower
        self._batcher = batcher
        self._room = room
        self._reserved_bytes = 0
        self._buffer: Tensor | None = None
        self._slices: list[asyncio.Future[Forward]] = []
        self._ahead = asyncio.Semaphore(max(1, _FORWARDS_AHEAD * batcher.budget_tokens // plan.grid.slice_tokens))
        self._changed = asyncio.Event()

    @property
    def size_bytes(self) -> int:
        return embeds_bytes(self._tower, self.plan.grid.tokens)

    @property
    def embeds(self) -> Tensor:
        """Of a complete item: (1 + levels, tokens, D). It is never written to again."""
        assert self._buffer is not None
        assert self.complete
        return self._buffer

    @property
    def complete(self) -> bool:
        return self.failure is None and self.encoded_slices == self.plan.grid.t

    async def changed(self) -> None:
        """Waits until more slices are decoded or encoded, or something failed."""
        await self._changed.wait()

    async def reserve(self) -> None:
        """Waits for room for all of it; at once, if it has been had before. Holds none where it raises."""
        if self._buffer is not None:
            return
        await self._room.reserve(self.size_bytes)
        self._reserved_bytes = self.size_bytes
        try:
            self._buffer = torch.empty(self._shape, dtype=self._tower.dtype, device=self._tower.device)
        except BaseException:  # the device may be out of memory; whoever leads next reserves again
            self.give_room_back()
            raise

    async def add(self, piece: FrameSlice) -> None:
        """Takes the next slice, waiting while enough of them are ahead in the batcher's queue.

        Slices that it has are passed over: a stream that takes another's place begins anew.
        Raises Unavailable, and fails, once the tower takes no more: nobody would bring this slice again.
        """
        if piece.index < self.decoded_slices:
            return
        assert piece.index == self.decoded_slices
        self.repaired_frames += piece.repaired_frames
        self.moments.decoded_ns, self.moments.resized_ns = piece.decoded_ns, piece.resized_ns
        self.decoded_slices += 1
        self.queued_ns = self.queued_ns or monotonic_ns()
        self.tell()
        await self._ahead.acquire()
        if self._buffer is None or self.failure is not None:
            self._ahead.release()
            return
        start = piece.index * self.plan.grid.slice_tokens
        pixels = torch.frombuffer(piece.frames.data, dtype=torch.uint8).view(piece.frames.shape)
        target = self._buffer[:, start : start + self.plan.grid.slice_tokens]
        try:
            submitted = self._batcher.submit(pixels, target)
        except Unavailable as error:
            self._ahead.release()
            self.fail(error)
            raise
        encoded = asyncio.wrap_future(submitted)
        encoded.add_done_callback(self._slice_done)
        self._slices.append(encoded)

    async def fill(self, embeds: Tensor) -> None:
        """Takes all of its embeddings, (1 + levels, tokens, D) of any float dtype, in place of slices."""
        assert self._buffer is not None
        self.moments.begun_ns = monotonic_ns()
        await asyncio.to_thread(self._buffer.copy_, embeds)
        self.moments.encoded_ns = monotonic_ns()
        self.decoded_slices = self.encoded_slices = self.plan.grid.t
        self.tell()

    def fail(self, error: BaseException) -> None:
        """Nothing more will come of it; whoever waits is told why."""
        self.failure = self.failure or error
        self.tell()

    def tell(self) -> None:
        """Wakes everyone who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def give_room_back(self) -> None:
        """The buffer is held on in somebody else's account; safe to call again."""
        if self._reserved_bytes:
            self._room.release(self._reserved_bytes)
            self._reserved_bytes = 0

    def close(self) -> None:
        """Takes what waits for the tower out of its queue, and gives the room back; safe to call again."""
        slices, self._slices = self._slices, []
        for encoded in slices:
            encoded.cancel()
        self._buffer = None
        self.give_room_back()

    def _slice_done(self, encoded: asyncio.Future[Forward]) -> None:
        self._ahead.release()
        if encoded.cancelled():
            return
        if error := encoded.exception():
            self.fail(error)
            return
        forward = encoded.result()
        self.entered_ns = self.entered_ns or forward.begun_ns
        self.moments.begun_ns = max(self.moments.begun_ns, forward.begun_ns)
        self.moments.encoded_ns = max(self.moments.encoded_ns, forward.ended_ns)
        self.encoded_slices += 1
        self.tell()


def embeds_bytes(tower: Tower, tokens: int) -> int:
    """Of so many tokens' embeddings, all levels."""
    return (1 + tower.embed_levels) * tokens * tower.embed_dim * tower.dtype.itemsize
