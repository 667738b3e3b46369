"""PreprocessingService: the plan first, then the frames of what is selected, as they are decoded.

It owns the order of a stream's messages. What is planned and how it is decoded is told by others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from time import monotonic_ns
from typing import TypeAlias

import grpc

from common.contract.errors import InvalidRequest
from common.contract.requests import selections
from common.telemetry.logs import add_request_stats
from common.telemetry.metrics import STAGE_BUSY_SECONDS, busy
from common.telemetry.tracing import span
from framesieve.v1 import preprocessing_pb2, preprocessing_pb2_grpc
from framesieve.v1.preprocessing_pb2 import PreprocessRequest, PreprocessResponse
from services.preprocessing.fetch.fetcher import Fetcher
from services.preprocessing.planner import Conversation, PlannedPrompt, Planner, Readers
from services.preprocessing.rpc.messages import conversation_of, frames_responses, plan_responses
from services.preprocessing.rpc.metrics import count_fetched, count_frames
from services.preprocessing.rpc.threads import Threads
from services.preprocessing.rpc.work import worked_on
from services.preprocessing.video.slices import PlannedMedia
from services.preprocessing.workers.jobs import slices_job
from services.preprocessing.workers.pool import Pool
from services.preprocessing.workers.reading import Reading

Requests: TypeAlias = AsyncIterator[PreprocessRequest]
Context: TypeAlias = grpc.aio.ServicerContext[PreprocessRequest, PreprocessResponse]


class PreprocessingServicer(preprocessing_pb2_grpc.PreprocessingServiceServicer):
    """Prompts are planned on threads, frames decoded by a pool that does nothing else: no plan waits behind them.

    quick: threads that check prompts, and plan short ones without media. slow: those that plan the rest, and may all
    wait for a worker that reads, or for one file to be hashed.
    """

    def __init__(
        self,
        planner: Planner,
        fetcher: Fetcher,
        quick: Threads,
        slow: Threads,
        reading_workers: Pool,
        decoding_workers: Pool,
    ) -> None:
        self._planner = planner
        self._fetcher = fetcher
        self._quick = quick
        self._slow = slow
        self._reading_workers = reading_workers
        self._decoding_workers = decoding_workers

    async def Preprocess(self, request_iterator: Requests, context: Context) -> AsyncIterator[PreprocessResponse]:
        requests = aiter(request_iterator)
        conversation, fetched_ns = await self._fetched(await self._conversation(await anext(requests, None)))
        with span("plan"):
            planned = await self._planned(conversation)
        add_request_stats(prompt_tokens_full=planned.plan.tokens, media=len(planned.media))
        with planned.files:
            for response in plan_responses(planned.plan, fetched_ns):
                yield response
            async for media_index in selections(requests, len(planned.media)):
                # Closed before the files are: an abandoned generator would be closed some time later.
                async with aclosing(self._frames(media_index, planned.media[media_index])) as responses:
                    async for response in responses:
                        yield response

    async def _conversation(self, request: PreprocessRequest | None) -> Conversation:
        if request is None or not request.HasField("prompt"):
            raise InvalidRequest("the first request of a stream must be a prompt")
        return await self._quick.call(partial(conversation_of, request.prompt))

    async def _fetched(self, conversation: Conversation) -> tuple[Conversation, int | None]:
        """The same without URLs, and when the last was fetched, if any was.

        Whoever leaves meanwhile leaves no connection and no file.
        """
        if not conversation.links:
            return conversation, None
        with busy("fetch"), span("fetch", media=len(conversation.links)):
            sources = await self._fetcher.fetch_all(conversation.links)
        count_fetched(sources.values())
        return conversation.with_fetched(sources), monotonic_ns()

    async def _planned(self, conversation: Conversation) -> PlannedPrompt:
        reading = Reading(self._reading_workers)
        read = Readers(reading.packets, reading.picture, reading.check_wanted)
        threads = self._quick if conversation.quick else self._slow
        job = asyncio.ensure_future(threads.call(partial(self._planner.plan, conversation, read)))
        try:
            planned = await asyncio.shield(job)
        except asyncio.CancelledError:
            reading.leave()
            job.add_done_callback(_close_files)  # the thread runs on, and nobody else sees what it opened
            raise
        STAGE_BUSY_SECONDS.labels("plan").observe(planned.plan_s)
        return planned

    async def _frames(self, media_index: int, media: PlannedMedia) -> AsyncGenerator[PreprocessResponse, None]:
        job = slices_job(media)
        if job is None:
            return
        with worked_on(media_index) as work:
            async with self._decoding_workers.ahead(job) as slices:
                async for each in slices:
                    work.add(each)
                    count_frames(each)
                    add_request_stats(frames=len(each.pixels))
                    for response in frames_responses(media_index, each):
                        yield response


def _close_files(job: asyncio.Future[PlannedPrompt]) -> None:
    if not job.cancelled() and job.exception() is None:
        job.result().files.close()


SERVICE = preprocessing_pb2.DESCRIPTOR.services_by_name["PreprocessingService"].full_name
