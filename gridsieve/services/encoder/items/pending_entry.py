"""A cache entry that is being made: the slices of one media item on their way through the tower.

    reserve ──▶ add_slice × t ────▶ entry ──▶ close
    (bytes)     (queued for the     (all slices    (bytes released,
                 tower, in order;    encoded: a     queued slices cancelled)
                 or copied)          CacheEntry)

The tower sees each slice by itself, so a slice that repeats an earlier one of its item, or that a cached entry has, is
copied. It knows neither gRPC nor where frames come from. It belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from time import monotonic_ns

import torch
from torch import Tensor

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract.errors import Unavailable
from gridsieve.common.contract.plan import Int32Array, MediaPlan, Modality
from gridsieve.common.contract.retention import ItemPruning
from gridsieve.services.encoder.items.batcher import Batcher, ForwardTimes
from gridsieve.services.encoder.items.cache_entry import CacheEntry, StageTimes, copied_embeds, copy_embeds
from gridsieve.services.encoder.items.decoded_slices import DecodedSlices, FrameSlice, SliceKey, num_encoded
from gridsieve.services.encoder.metrics import REUSED_SLICES
from gridsieve.services.encoder.pruning.methods import SCORES_BYTES
from gridsieve.services.encoder.tower.patches import KeptFrames, TimedFrames, whole
from gridsieve.services.encoder.tower.sound import Sound
from gridsieve.services.encoder.tower.tower import Slice, Tower

# Slices of one entry that may be queued for the tower, in forwards; further slices hold the decoder back.
_FORWARDS_AHEAD = 2


class Delivery:
    """One stream fills one entry, from before it selects the item until the last slice or the stream's failure.

    The stream owns it. An entry has one delivery at a time; it gets another one if the stream fails.
    media_index: of the item in the stream. abandoned: what to call once no requested item waits for the entry.
    """

    def __init__(self, media_index: int, pending: PendingEntry, abandoned: Callable[[], None]) -> None:
        assert pending.needs_delivery
        self.media_index = media_index
        self.pending = pending
        self.abandoned = abandoned
        pending.delivery = self

    @property
    def active(self) -> bool:
        """Whether the entry still takes slices from this delivery."""
        return self.pending.delivery is self

    @property
    def wanted(self) -> bool:
        """Whether a requested item waits for these slices."""
        return self.active and self.pending.waiters > 0

    def end(self) -> None:
        """Leaves the entry to another delivery, if slices are missing; may be called twice."""
        if self.active:
            self.pending.delivery = None
            self.pending.notify()


class PendingEntry:
    """A `CacheEntry` that is being made.

    key, encoding: of the entry. chosen: how its tokens are chosen before the tower: it then has embeddings of these
    alone. None: of all tokens. slices: the decoded ones.
    waiters: how many requested items wait for it. delivery: brings its slices. None: no stream does, and the next
    waiter selects the item from its own stream.
    entry: once all slices are encoded. failure: why there will be no entry. The counts of slices never decrease.
    ready_slices: how many slices from the first on have all their embeddings.
    queued_ns: when the first slice was queued for the tower. entered_ns: when the first forward with one began.
    """

    def __init__(
        self,
        key: bytes,
        encoding: bytes,
        plan: MediaPlan,
        tower: Tower,
        batcher: Batcher,
        encoding_bytes: ByteSemaphore,
        chosen: ItemPruning | None = None,
        find: Callable[[SliceKey], Tensor | None] = lambda key: None,
        adapter: bytes = b"",
    ) -> None:
        """find: the embeddings of an equal slice, (1 + levels, its tokens, D), if the cache has one. adapter: digest of
        the adapter that the tower computes with; empty: none."""
        self.key = key
        self.encoding = encoding
        self.plan = plan
        self.chosen = chosen
        self.waiters = 0
        self.delivery: Delivery | None = None
        self.entry: CacheEntry | None = None
        self.failure: BaseException | None = None
        self.ready_slices = 0
        self.queued_ns: int | None = None
        self.entered_ns: int | None = None
        self._done: set[int] = set()  # slices after the ready ones that are encoded
        self._repaired_frames = 0
        self._times = StageTimes()
        self._tower = tower
        self._arrangement = tower.arrangement(plan)
        self.slices = DecodedSlices(plan, self._arrangement, chosen, adapter)
        self._batcher = batcher
        self._adapter = adapter
        self._find = find
        self._encoding_bytes = encoding_bytes
        self._reserved_bytes = 0
        self._buffer: Tensor | None = None
        self._stored: set[int] = set()
        self._arranged: Tensor | None = None  # what the tower's thread made of the buffer
        self._encoded: dict[int, asyncio.Future[ForwardTimes]] = {}
        self._finishing: asyncio.Task[None] | None = None
        self._ahead = asyncio.Semaphore(max(1, _FORWARDS_AHEAD * batcher.packing.largest.tokens // self._slice_load))
        self._changed = asyncio.Event()

    @property
    def _slice_load(self) -> int:
        """Merged patches of a slice, of its largest frames."""
        plan = self.plan
        if plan.modality is Modality.AUDIO:
            return plan.grid.tokens
        if self.chosen:  # on average: the first slice is whole
            return -(-self.slices.tokens // plan.slices)
        sizes = {plan.frames.frame_px(0), plan.frames.frame_px(1)}
        return max(1, *(self._tower.patches.load((plan.slice_frames, *size, 3)) for size in sizes))

    @property
    def in_parts(self) -> bool:
        """Whether a slice of the grid is done when it has been through the tower."""
        plan = self.plan
        by_slice = self._arrangement.of_item is None and self._arrangement.slice_tokens == plan.grid.slice_tokens
        return by_slice and plan.slices == plan.grid.t

    def part(self, start: int, end: int) -> tuple[Tensor, Int32Array | None]:
        """Embeddings (1 + levels, n, D) of slices [start, end) that are ready, and the tokens that they have of the
        grid, int32 (n,); None: all of them."""
        assert self._buffer is not None
        assert end <= self.ready_slices
        rows = slice(self.slices.rows_before(start), self.slices.rows_before(end))
        return self._buffer[:, rows], self.slices.kept(start, end)

    @property
    def decoded_slices(self) -> int:
        return len(self.slices.rows)

    @property
    def encoded_slices(self) -> int:
        return self.ready_slices + len(self._done)

    @property
    def decoded(self) -> bool:
        return self.decoded_slices == self.plan.slices

    @property
    def needs_delivery(self) -> bool:
        """Whether slices are missing that no stream brings."""
        return self.delivery is None and self.failure is None and not self.decoded

    async def wait_for_change(self) -> None:
        """Waits until a slice is decoded or encoded, a delivery begins or ends, or the entry is made or fails."""
        await self._changed.wait()

    def notify(self) -> None:
        """Wakes everything that waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def fail(self, error: BaseException) -> None:
        """Fails the entry, and so all its waiters, unless it has failed before."""
        self.failure = self.failure or error
        self.notify()

    async def reserve(self) -> None:
        """Waits for bytes for all embeddings and allocates them; returns at once if the entry has them already.

        Holds nothing if it raises.
        """
        if self._buffer is not None:
            return
        tokens = self.slices.tokens if self.chosen else self._arrangement.tokens_before(self.plan.slices)
        size_bytes = encoding_bytes(self._tower, self.plan, self.chosen)
        await self._encoding_bytes.reserve(size_bytes)
        self._reserved_bytes = size_bytes
        try:
            with self._batcher.ending_on_device_errors():
                # A device may have to free memory first.
                self._buffer = await asyncio.to_thread(self._tower.room_for, tokens)
        except BaseException:  # the device may be out of memory; the next delivery reserves again
            self._release_reservation()
            raise

    async def add_slice(self, arrived: FrameSlice) -> None:
        """Queues the next slice for the tower; waits while enough slices of this entry are queued. Copies it instead,
        if it is an equal one.

        Slices that it has are skipped: every delivery starts at slice 0.
        Raises Unavailable, and fails the entry, once the tower accepts no more slices; PeerContract for slices of more
        or fewer tokens than are chosen.
        """
        if arrived.index < self.decoded_slices:
            return
        rows = self.slices.append(arrived)
        self._repaired_frames += arrived.repaired_frames
        # Several workers decode a long video, so that its last slice need not be the last one done.
        self._times.decoded_ns = max(self._times.decoded_ns or 0, arrived.decoded_ns)
        self._times.resized_ns = max(self._times.resized_ns or 0, arrived.resized_ns)
        self.queued_ns = self.queued_ns or monotonic_ns()
        if rows.start == rows.stop:
            self._count_encoded(arrived.index)
            return
        self.notify()
        if self._buffer is None or self.failure is not None:  # closed or failed while it was sent
            return
        key, target = self.slices.keys[arrived.index], self._buffer[:, rows]
        if arrived.repeats is not None:
            REUSED_SLICES.labels("repeated").inc()
            source = self._buffer[:, self.slices.rows[arrived.repeats]]
            self._await_slice(arrived.index, self._copied(source, target, self._encoded[arrived.repeats]))
        elif key and (cached := self._find(key)) is not None:
            REUSED_SLICES.labels("cached").inc()
            self._await_slice(arrived.index, self._copied(cached, target))
        else:
            await self._queue(arrived, target)

    async def _copied(
        self, source: Tensor, target: Tensor, made: asyncio.Future[ForwardTimes] | None = None
    ) -> ForwardTimes:
        """Copies embeddings, once they are made."""
        if made is not None:
            await asyncio.wait([made])
            made.result()
        begun_ns = monotonic_ns()
        with self._batcher.ending_on_device_errors():
            await asyncio.to_thread(copy_embeds, source, target)
        return ForwardTimes(begun_ns, monotonic_ns())

    async def _queue(self, arrived: FrameSlice, target: Tensor) -> None:
        await self._ahead.acquire()
        if self._buffer is None or self.failure is not None:  # closed or failed while it waited
            self._ahead.release()
            return
        assert arrived.frames is not None
        dtype: torch.dtype = getattr(torch, arrived.frames.dtype.label)
        pixels = torch.frombuffer(arrived.frames.data, dtype=dtype).view(arrived.frames.shape)
        frames = self._frames(arrived, pixels)
        try:
            store = partial(self._store, arrived.index, target)
            submitted = self._batcher.submit(frames, target, store, self._adapter)
        except Unavailable as error:
            self._ahead.release()
            self.fail(error)
            raise
        encoded = asyncio.wrap_future(submitted)
        encoded.add_done_callback(lambda _: self._ahead.release())
        self._await_slice(arrived.index, encoded)

    def _await_slice(self, index: int, times: Awaitable[ForwardTimes]) -> None:
        encoded = asyncio.ensure_future(times)
        encoded.add_done_callback(partial(self._slice_done, index))
        self._encoded[index] = encoded

    def _frames(self, arrived: FrameSlice, pixels: Tensor) -> Slice:
        """What the tower is given of a slice. pixels: (F, H, W, 3); the last ones of a video are made whole. Of a sound
        (1, mels, frames, 1)."""
        if self.plan.modality is Modality.AUDIO:
            return Sound(pixels[0, :, :, 0])
        if self.plan.modality is Modality.VIDEO:
            pixels = whole(pixels, self._tower.patches)
        if arrived.kept is not None:
            return KeptFrames(pixels, (self.plan.grid.h, self.plan.grid.w), tuple(arrived.kept.tolist()))
        times = self.slices.times_of(arrived.index)
        return TimedFrames(pixels, times) if times else pixels

    def _release_reservation(self) -> None:
        if self._reserved_bytes:
            self._encoding_bytes.release(self._reserved_bytes)
            self._reserved_bytes = 0

    def close(self) -> None:
        """Removes its slices from the tower's queue and frees buffer and bytes; may be called twice."""
        futures, self._encoded = self._encoded, {}
        for encoded in futures.values():
            encoded.cancel()
        # Items refer to it until their request ends.
        self.entry = self._buffer = self._arranged = None
        self._release_reservation()

    def _store(self, index: int, target: Tensor, rows: Tensor) -> None:
        """Stores the tower's tokens of a slice, and after the last slice arranges all of them. It runs in the tower's
        thread, and again for a slice whose forward lacked memory together with others."""
        arrangement, buffer = self._arrangement, self._buffer
        target.copy_(arrangement.of_slice(rows) if arrangement.of_slice else rows)
        self._stored.add(index)
        if arrangement.of_item and len(self._stored) == self.plan.slices and buffer is not None:
            self._arranged = arrangement.of_item(buffer)
            if self._buffer is None:  # closed meanwhile
                self._arranged = None

    def _slice_done(self, index: int, encoded: asyncio.Future[ForwardTimes]) -> None:
        if encoded.cancelled():
            return
        if error := encoded.exception():
            self.fail(error)
            return
        forward = encoded.result()
        self.entered_ns = min(self.entered_ns or forward.begun_ns, forward.begun_ns)
        self._times.begun_ns = max(self._times.begun_ns, forward.begun_ns)
        self._times.encoded_ns = max(self._times.encoded_ns, forward.ended_ns)
        self._count_encoded(index)

    def _count_encoded(self, index: int) -> None:
        self._done.add(index)
        while self.ready_slices in self._done:
            self._done.remove(self.ready_slices)
            self.ready_slices += 1
        if self.ready_slices == self.plan.slices:
            self._finishing = asyncio.create_task(self._finish())
        self.notify()

    async def _finish(self) -> None:
        """Makes the entry, in memory for its own tokens alone: for others, which were not chosen, it may have been
        reserved."""
        embeds, tokens = self._buffer if self._arranged is None else self._arranged, self.slices.tokens
        try:
            if embeds is not None and embeds.shape[1] > tokens:
                with self._batcher.ending_on_device_errors():
                    embeds = await asyncio.to_thread(copied_embeds, embeds[:, :tokens], self._tower)
        except Exception as error:
            self.fail(error)
            return
        if embeds is None or self._buffer is None:  # closed meanwhile
            return
        self._buffer = embeds
        beside = SCORES_BYTES * tokens
        if self.chosen:
            beside = len(self.chosen.reference) + len(self.slices.reference)
        self.entry = CacheEntry(
            self.key,
            self.encoding,
            embeds,
            self.slices.kept(0, self.plan.slices),
            {key: rows for key, rows in zip(self.slices.keys, self.slices.rows, strict=True) if key},
            self._times,
            self._repaired_frames,
            self.slices.reference,
            embeds.nbytes + beside,
        )
        self.notify()


def encoding_bytes(tower: Tower, plan: MediaPlan, chosen: ItemPruning | None) -> int:
    """Bytes that encoding an item takes: its embeddings, and before them what they are arranged from."""
    tokens = num_encoded(plan, chosen)
    arrangement = tower.arrangement(plan)
    if arrangement.of_item:
        tokens += arrangement.tokens_before(plan.slices)
    return tower.embeds_bytes(tokens)
