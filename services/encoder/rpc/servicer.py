"""EncoderService: the plan first, then the pruned embeddings of what is selected, items in the order of selection.

    selecting   select ─▶ room for what is sent ─▶ join its entry ─▶ lead it: room, select upstream
    obtaining                                      (one task an item)  entry complete ─▶ gather ─▶ leave the entry
    sending                                                            in order ─▶ stream ─▶ release

Who has not reserved does not select. What an entry is made of comes by a request's feed, its own or another's.
It owns the order of messages, and what a device without memory is told as.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeAlias

import grpc
import structlog
import torch

from common.byte_semaphore import ByteSemaphore
from common.contract.errors import InvalidRequest, Overloaded
from common.contract.plan import PromptPlan
from common.contract.requests import check_prompt, selections
from common.contract.retention import Pruning
from common.security.credentials import NO_CREDENTIALS, Credentials
from common.serving.interceptors import passed_on
from framesieve.v1 import encoder_pb2, encoder_pb2_grpc
from framesieve.v1.encoder_pb2 import EncodeRequest, EncodeResponse
from services.encoder.items.cache import EmbedsCache
from services.encoder.items.feed import Feed
from services.encoder.items.item import Item
from services.encoder.items.preprocess_stream import Expectation, FrameStream
from services.encoder.rpc.messages import BroughtEmbeds, checked_prunings, take_embeds
from services.encoder.rpc.responses import Responses

SERVICE = encoder_pb2.DESCRIPTOR.services_by_name["EncoderService"].full_name

log = structlog.get_logger()

Requests: TypeAlias = AsyncIterator[EncodeRequest]
Context: TypeAlias = grpc.aio.ServicerContext[EncodeRequest, EncodeResponse]


class EncoderServicer(encoder_pb2_grpc.EncoderServiceServicer):
    """Serves the tower behind `cache`; outputs: room for what waits to be sent, as much as the cache's at least.

    preprocessing: the channel to the service that decodes; credentials: whose token is shown to it.
    """

    def __init__(
        self,
        fingerprint: bytes,
        cache: EmbedsCache,
        outputs: ByteSemaphore,
        preprocessing: grpc.aio.Channel,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        assert outputs.size_bytes >= cache.room.size_bytes
        self._tower = cache.tower
        self._cache = cache
        self._outputs = outputs
        self._preprocessing = preprocessing
        self._credentials = credentials
        self._expected = Expectation(self._tower.patches, self._tower.embed_levels, fingerprint)

    async def Encode(self, request_iterator: Requests, context: Context) -> AsyncIterator[EncodeResponse]:
        responses = Responses()
        # No deadline of this caller's: others may wait for what its stream decodes. It ends by being cancelled.
        options = {**passed_on(context, self._credentials), "timeout": None}
        task = asyncio.create_task(self._answer(aiter(request_iterator), options, responses))
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
        check_prompt(first.prompt.prompt)
        prunings = checked_prunings(first.prompt, self._tower.pruning_methods)
        brought = await asyncio.to_thread(take_embeds, first.prompt.prompt, self._tower)
        feed = Feed(FrameStream(self._preprocessing, options, self._expected))
        try:
            grids = {index: embeds.grid for index, embeds in brought.items()}
            plan = await feed.plan(first.prompt.prompt, grids)
            del first  # its media may be large
            await responses.put_plan(plan, feed.fetched_ns)
            await self._encode(selections(requests, len(plan.media)), plan, prunings, brought, feed, responses)
        except torch.OutOfMemoryError as error:
            log.warning("the device is full", error=str(error))
            raise Overloaded("the encoder's device has no memory left") from error
        finally:
            feed.leave()

    async def _encode(
        self,
        selections: AsyncIterator[int],
        plan: PromptPlan,
        prunings: tuple[Pruning, ...],
        brought: dict[int, BroughtEmbeds],
        feed: Feed,
        responses: Responses,
    ) -> None:
        items: list[Item] = []
        started: asyncio.Queue[tuple[Item, asyncio.Task[None]] | None] = asyncio.Queue()

        async def select(group: asyncio.TaskGroup) -> None:
            async for index in selections:
                item = Item(index, plan.media[index], prunings[index], self._cache, self._outputs)
                items.append(item)
                await item.start(feed, brought.pop(index).tensor if index in brought else None)
                started.put_nowait((item, group.create_task(item.obtain(feed, responses.offer_progress))))
            started.put_nowait(None)
            for item in items:
                await item.settled(feed)
            await feed.all_selected()

        async def send() -> None:
            while (each := await started.get()) is not None:
                item, obtained = each
                await obtained
                await responses.put_embeds(item)
                item.close()

        try:
            async with asyncio.TaskGroup() as group:
                for step in (select(group), send(), feed.ended()):
                    group.create_task(step)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            for item in items:
                item.close()


def _abandon(task: asyncio.Task[None]) -> None:
    task.cancel()
