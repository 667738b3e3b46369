"""The responses of one call of Encode, in messages.

A slow caller holds back embeddings (see `ResponseQueue`); progress messages are dropped while the queue is full.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract.plan import PromptPlan
from gridsieve.common.contract.tensors import pieces
from gridsieve.common.contract.wire import ago_s, fill_chunk, int32_tensor, plan_messages
from gridsieve.common.handover import Sender
from gridsieve.common.response_queue import ResponseQueue
from gridsieve.services.encoder.items.cache_entry import StageTimes
from gridsieve.services.encoder.items.item import Embeds, Item
from gridsieve.v1.encoder_pb2 import EmbedsChunk, EncodeResponse, MediaProgress, StageAges

_PROGRESS_EVERY_S = 0.05


class Responses:
    """Messages to be sent, in order."""

    def __init__(self, room: ByteSemaphore) -> None:
        """room: the bytes of all embeddings waiting to be sent, over all calls."""
        self.sender: Sender | None = None  # to a caller who takes shared memory
        self._queue: ResponseQueue[EncodeResponse] = ResponseQueue(room)
        self._order = asyncio.Lock()
        self._reported: dict[int, tuple[int, int, float]] = {}

    async def put(self, response: EncodeResponse) -> None:
        """Raises Overloaded if the caller reads nothing while others wait for room."""
        async with self._order:
            await self._queue.put(response)

    async def put_plan(self, plan: PromptPlan, fetched_ns: int | None) -> None:
        """fetched_ns: when media fetched by URL were complete, None without such media; sent with the first piece."""
        fetched_ago_s = None if fetched_ns is None else ago_s(fetched_ns)
        for message in plan_messages(plan):
            await self.put(EncodeResponse(plan=message, fetched_ago_s=fetched_ago_s))
            fetched_ago_s = None

    def offer_progress(self, item: Item) -> None:
        """Reports progress unless the queue is full: at the end of each stage, otherwise at most every 50 ms."""
        if not self._order.locked() and not self._queue.full and (progress := self._progress(item)):
            self._queue.put_nowait(progress)

    async def put_embeds(self, item: Item, embeds: Embeds) -> None:
        """Puts the progress of an item, then a part of it: in pieces, or in shared memory.

        Returns once the caller has taken the latter.
        """
        start, end = embeds.slices
        async with self._order:
            if progress := self._progress(item):
                await self._queue.put(progress)
        extra: dict[str, Any] = {} if start else {"encoding": embeds.encoding, "method": item.pruning.method}
        if end < item.plan.slices:
            extra["slices"] = end - start
        else:
            extra |= {"repaired_frames": item.repaired_frames, "ages": _ages(item.times), "reference": item.reference}
        if embeds.kept is not None:
            extra["kept"] = int32_tensor(embeds.kept)
        shared = bool(self.sender and embeds.memory and await self.sender.send(embeds.memory, embeds.data.nbytes))
        for offset, piece in [(0, None)] if shared else pieces(embeds.data):
            response = EncodeResponse(embeds=EmbedsChunk(media_index=item.media_index, **extra))
            fill_chunk(response.embeds.chunk, embeds.dtype, embeds.shape, offset, piece)
            await self.put(response)
            extra = {}
        if self.sender and shared:
            await self._queue.read(self.sender.wait_until_taken)

    def until_done(self, task: asyncio.Task[None]) -> AsyncGenerator[EncodeResponse, None]:
        """As `ResponseQueue.until_done`."""
        return self._queue.until_done(task)

    def _progress(self, item: Item) -> EncodeResponse | None:
        decoded, encoded, reported_at = self._reported.get(item.media_index, (0, 0, 0.0))
        counts, slices = (item.decoded_slices, item.encoded_slices), item.plan.slices
        ends = any(now == slices != before for now, before in zip(counts, (decoded, encoded), strict=True))
        now_s = time.monotonic()
        if counts == (decoded, encoded) or not (ends or now_s - reported_at >= _PROGRESS_EVERY_S):
            return None
        self._reported[item.media_index] = (*counts, now_s)
        progress = MediaProgress(media_index=item.media_index, decoded_slices=counts[0], encoded_slices=counts[1])
        return EncodeResponse(progress=progress)


def _ages(times: StageTimes) -> StageAges:
    return StageAges(
        decoded_s=None if times.decoded_ns is None else ago_s(times.decoded_ns),
        resized_s=None if times.resized_ns is None else ago_s(times.resized_ns),
        begun_s=ago_s(times.begun_ns),
        encoded_s=ago_s(times.encoded_ns),
        pruned_s=ago_s(times.pruned_ns),
    )
