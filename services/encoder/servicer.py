"""EncoderService: the plan first, then the pruned embeddings of what is selected, items in the order of selection.

    selecting   select ─▶ reserve room ─▶ select upstream         (who has not reserved does not select)
    receiving                             slices ─▶ batcher
    sending                                         encoded ─▶ prune ─▶ stream ─▶ release

An item whose embeddings came with the prompt is filled with them where another is selected upstream.
The three run side by side for one call and meet in its items. It owns the order of messages and nothing else.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeAlias

import grpc

from common.channels import passed_on
from common.errors import InvalidRequest
from common.plan import PromptPlan
from common.retention import Pruning
from common.room import Room
from common.selection import selections
from common.telemetry import STREAMED_BYTES
from common.wire import int32_tensor, plan_messages, tensor_chunks
from framesieve.v1 import encoder_pb2, encoder_pb2_grpc
from framesieve.v1.encoder_pb2 import EmbedsChunk, EncodeRequest, EncodeResponse, MediaProgress
from services.encoder.batcher import Batcher
from services.encoder.frames import Expectation, FrameStream
from services.encoder.items import Item
from services.encoder.messages import BroughtEmbeds, checked_prunings, take_embeds
from services.encoder.tower import Tower

SERVICE = encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name

# Messages made ahead of a slow reader, 1 MiB each at most.
_AHEAD = 2
_PROGRESS_EVERY_S = 0.05

Requests: TypeAlias = AsyncIterator[EncodeRequest]
Context: TypeAlias = grpc.aio.ServicerContext[EncodeRequest, EncodeResponse]


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """Serves one checkpoint's tower; `preprocessing` is the channel to the service that decodes."""

    def __init__(
        self, tower: Tower, fingerprint: bytes, batcher: Batcher, room: Room, preprocessing: grpc.aio.Channel
    ) -> None:
        self._tower = tower
        self._batcher = batcher
        self._room = room
        self._preprocessing = preprocessing
        self._expected = Expectation(tower.patches, tower.embed_levels, fingerprint)

    async def Encode(self, request_iterator: Requests, context: Context) -> AsyncIterator[EncodeResponse]:
        responses = Responses()
        task = asyncio.create_task(self._answer(aiter(request_iterator), passed_on(context), responses))
        # A caller that is gone is noticed here even while the last response is still being written.
        context.add_done_callback(lambda _: _abandon(task))  # type: ignore[arg-type]  # the stub's own type is no protocol
        try:
            async for response in responses.until_done(task):
                yield response
        finally:
            _abandon(task)
            await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # told to the caller, or there is no caller left to tell

    async def _answer(self, requests: Requests, options: Mapping[str, Any], responses: Responses) -> None:
        first = await anext(requests, None)
        if first is None or not first.HasField("prompt"):
            raise InvalidRequest("the first request of a stream must be a prompt")
        prunings = checked_prunings(first.prompt, self._tower.pruning_methods)
        brought = await asyncio.to_thread(take_embeds, first.prompt.prompt, self._tower)
        frames = FrameStream(self._preprocessing, options, self._expected)
        try:
            grids = {index: embeds.grid for index, embeds in brought.items()}
            plan = await frames.plan(first.prompt.prompt, grids)
            del first  # its media may be large
            for message in plan_messages(plan):
                await responses.put(EncodeResponse(plan=message))
            await self._encode(selections(requests, len(plan.media)), plan, prunings, brought, frames, responses)
        finally:
            frames.cancel()

    async def _encode(
        self,
        selections: AsyncIterator[int],
        plan: PromptPlan,
        prunings: tuple[Pruning, ...],
        brought: dict[int, BroughtEmbeds],
        frames: FrameStream,
        responses: Responses,
    ) -> None:
        items: dict[int, Item] = {}
        reserved: asyncio.Queue[Item | None] = asyncio.Queue()

        async def select() -> None:
            async for index in selections:
                items[index] = item = Item(index, plan.media[index], prunings[index], self._tower, self._batcher)
                await item.reserve(self._room)
                reserved.put_nowait(item)
                if index in brought:
                    await item.fill(brought.pop(index).tensor)
                else:
                    await frames.select(index, item.plan)
            await frames.all_selected()
            reserved.put_nowait(None)

        async def receive() -> None:
            async for each in frames.slices():
                item = items[each.media_index]
                await item.add(each.frames, each.repaired_frames)
                await responses.put_progress(item)

        async def send() -> None:
            while (item := await reserved.get()) is not None:
                while not await item.next_encoded():
                    await responses.put_progress(item)
                await responses.put_progress(item)
                await responses.put_embeds(item)
                item.close()

        try:
            async with asyncio.TaskGroup() as group:
                for step in (select(), receive(), send()):
                    group.create_task(step)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            for item in items.values():
                item.close()


class Responses:
    """What is to be sent, in order, a few messages ahead of the reader."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[EncodeResponse | None] = asyncio.Queue(_AHEAD)
        self._order = asyncio.Lock()
        self._reported: dict[int, tuple[int, int, float]] = {}

    async def put(self, response: EncodeResponse) -> None:
        async with self._order:
            await self._queue.put(response)

    async def put_progress(self, item: Item) -> None:
        """Says how far the item is: at the end of each stage, and between at most every 50 ms."""
        async with self._order:
            decoded, encoded, reported_at = self._reported.get(item.media_index, (0, 0, 0.0))
            counts, slices = (item.decoded_slices, item.encoded_slices), item.plan.grid.t
            ends = any(now == slices != before for now, before in zip(counts, (decoded, encoded), strict=True))
            now_s = time.monotonic()
            if counts == (decoded, encoded) or not (ends or now_s - reported_at >= _PROGRESS_EVERY_S):
                return
            self._reported[item.media_index] = (*counts, now_s)
            progress = MediaProgress(media_index=item.media_index, decoded_slices=counts[0], encoded_slices=counts[1])
            await self._queue.put(EncodeResponse(progress=progress))

    async def put_embeds(self, item: Item) -> None:
        """Prunes the item and puts its pieces."""
        embeds = await item.finish()
        extra: dict[str, Any] = {"repaired_frames": item.repaired_frames}
        if embeds.kept is not None:
            extra["kept"] = int32_tensor(embeds.kept)
        for chunk in tensor_chunks(embeds.dtype, embeds.shape, embeds.data):
            await self.put(EncodeResponse(embeds=EmbedsChunk(media_index=item.media_index, chunk=chunk, **extra)))
            extra = {}
        STREAMED_BYTES.labels("sent", "embeds").inc(embeds.data.nbytes)

    async def until_done(self, task: asyncio.Task[None]) -> AsyncIterator[EncodeResponse]:
        """Everything that was put until `task` is done; then raises what it raised."""
        task.add_done_callback(self._wake)
        while not (task.done() and self._queue.empty()):
            response = await self._queue.get()
            if response is not None:
                yield response
        task.result()

    def _wake(self, _: asyncio.Task[None]) -> None:
        if self._queue.empty():
            self._queue.put_nowait(None)


def _abandon(task: asyncio.Task[None]) -> None:
    task.cancel()
