"""PreprocessingService: streams the plan first, then the frames of each selected item as they are decoded.

It owns the order of a stream's messages; `planner` plans, and `workers` read and decode media.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, aclosing
from functools import partial
from time import monotonic_ns
from typing import Any, TypeAlias

import grpc

from gridsieve.common.byte_semaphore import ByteSemaphore
from gridsieve.common.contract.errors import InvalidRequest, within
from gridsieve.common.contract.limits import MAX_INLINE_BYTES
from gridsieve.common.contract.plan import Modality
from gridsieve.common.contract.requests import pruning_from, received_pieces, selections
from gridsieve.common.contract.wire import pruning_of
from gridsieve.common.handover import Sender, sender_to
from gridsieve.common.response_queue import ResponseQueue
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.common.telemetry.metrics import STAGE_BUSY_SECONDS, busy
from gridsieve.common.telemetry.tracing import span
from gridsieve.common.yielding import begin_call
from gridsieve.services.preprocessing.conversation import Conversation
from gridsieve.services.preprocessing.fetch.fetcher import Fetcher
from gridsieve.services.preprocessing.items.item import PlannedMedia
from gridsieve.services.preprocessing.items.readers import Readers
from gridsieve.services.preprocessing.planner import PlannedPrompt, Planner
from gridsieve.services.preprocessing.pruning.choice import TokenChoice, choice_of
from gridsieve.services.preprocessing.rpc.decode_stats import DecodeStats
from gridsieve.services.preprocessing.rpc.messages import conversation_of, frames_responses, plan_responses
from gridsieve.services.preprocessing.rpc.metrics import count_frames
from gridsieve.services.preprocessing.rpc.planning_threads import PlanningThreads
from gridsieve.services.preprocessing.rpc.watching import Watching
from gridsieve.services.preprocessing.sound.planned import PlannedSound
from gridsieve.services.preprocessing.sources.in_thread import in_thread
from gridsieve.services.preprocessing.sources.source import ReceivedFile
from gridsieve.services.preprocessing.video.repeats import Repeats
from gridsieve.services.preprocessing.video.slices import PlannedEmbeds, PlannedVideo, Slice
from gridsieve.services.preprocessing.workers.job_queue import JobQueue
from gridsieve.services.preprocessing.workers.jobs import SoundFeatures, VideoSlices
from gridsieve.services.preprocessing.workers.media_reader import Indexes, MediaReader, indexes
from gridsieve.services.preprocessing.workers.segments import SegmentedDecoding
from gridsieve.services.preprocessing.workers.streams import StreamWorkers
from gridsieve.v1 import preprocessing_pb2, preprocessing_pb2_grpc, prompt_pb2
from gridsieve.v1.preprocessing_pb2 import PreprocessRequest, PreprocessResponse, WatchRequest, WatchResponse

Requests: TypeAlias = AsyncIterator[PreprocessRequest]
Context: TypeAlias = grpc.aio.ServicerContext[PreprocessRequest, PreprocessResponse]


class PreprocessingServicer(preprocessing_pb2_grpc.PreprocessingServiceServicer):
    """Plans prompts on threads and decodes frames in a queue of its own, so that no plan waits for decoding.

    quick: threads that check prompts, and plan short ones without media. slow: threads that plan the others; all of
    them may be waiting for reading workers, or hashing files. known: what was read of media before. held_bytes: limits
    decoded slices that wait until their tokens are chosen; what does not fit is decoded again.
    """

    def __init__(
        self,
        planner: Planner,
        fetcher: Fetcher,
        quick: PlanningThreads,
        slow: PlanningThreads,
        reading_queue: JobQueue,
        decoding_queue: JobQueue,
        streams: StreamWorkers,
        max_inline_bytes: int = MAX_INLINE_BYTES,
        known: Indexes | None = None,
        held_bytes: int = 2**28,
    ) -> None:
        self._planner = planner
        self._fetcher = fetcher
        self._watching = Watching(streams, fetcher)
        self._quick = quick
        self._slow = slow
        self._reading_queue = reading_queue
        self._decoding_queue = decoding_queue
        self._decoding = SegmentedDecoding(decoding_queue)
        self._holding = ByteSemaphore(held_bytes)
        self._max_inline_bytes = max_inline_bytes
        self._known = known or indexes()

    async def Preprocess(self, request_iterator: Requests, context: Context) -> AsyncIterator[PreprocessResponse]:
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        parsed = await self._parse(first)
        assert first is not None
        begin_call(first.prompt.yields)
        with ExitStack() as received:
            conversation, fetched_ns = await self._fetch(await _receive(requests, first.prompt, parsed, received))
            received.pop_all()  # from here on the plan owns the files
        salt = conversation.cache_salt
        with span("plan"):
            planned = await self._plan(conversation)
        add_request_stats(prompt_tokens_full=planned.plan.tokens, media=len(planned.media))
        with planned.files, sender_to(first.handover, "Preprocess") as sender:
            for response in plan_responses(planned.plan, fetched_ns):
                yield response
            async for media_index, select in selections(requests, len(planned.media)):
                with within("select"):
                    item = planned.plan.media[media_index]
                    pruning = pruning_from(select, pruning_of(select.pruning), item)
                    choice = choice_of(pruning, item, shares=sender is not None)
                queue = ResponseQueue[PreprocessResponse](None)
                media = planned.media[media_index]
                # The tiles of an image differ.
                repeats = Repeats(item, salt) if item.modality is Modality.VIDEO else None
                task = asyncio.create_task(self._frames(media_index, media, choice, repeats, sender, queue))
                # `aclosing` stops the job before the files are closed; an abandoned generator would be closed later.
                async with aclosing(queue.until_done(task)) as responses:
                    async for response in responses:
                        yield response

    async def Watch(self, request_iterator: AsyncIterator[WatchRequest], context: Any) -> AsyncIterator[WatchResponse]:
        async with aclosing(self._watching.responses(aiter(request_iterator))) as responses:
            async for response in responses:
                yield response

    async def _parse(self, request: PreprocessRequest | None) -> Conversation:
        if request is None or not request.HasField("prompt"):
            raise InvalidRequest("the first request of a stream must be a prompt")
        return await self._quick.call(partial(conversation_of, request.prompt, self._max_inline_bytes))

    async def _fetch(self, conversation: Conversation) -> tuple[Conversation, int | None]:
        """The conversation with its URLs fetched, and the monotonic time at which the last was, if there are any.

        Cancelling closes the connections and files.
        """
        if not conversation.urls:
            return conversation, None
        with busy("fetch"), span("fetch", media=len(conversation.urls)):
            sources = await self._fetcher.fetch_all(conversation.urls)
        return conversation.with_sources(sources), monotonic_ns()

    async def _plan(self, conversation: Conversation) -> PlannedPrompt:
        reader = MediaReader(self._reading_queue, self._decoding_queue, self._known)
        readers = Readers(reader.packets, reader.pictures, reader.check_cancelled, reader.shots, reader.sound)
        threads = self._quick if conversation.is_quick else self._slow
        job = asyncio.ensure_future(threads.call(partial(self._planner.plan, conversation, readers)))
        try:
            planned = await asyncio.shield(job)
        except asyncio.CancelledError:
            reader.cancel()
            job.add_done_callback(_close_files)  # the thread continues, and nothing else closes its files
            raise
        STAGE_BUSY_SECONDS.labels("plan").observe(planned.plan_s)
        return planned

    async def _frames(
        self,
        media_index: int,
        media: PlannedMedia,
        choice: TokenChoice | None,
        repeats: Repeats | None,
        sender: Sender | None,
        queue: ResponseQueue[PreprocessResponse],
    ) -> None:
        if isinstance(media, PlannedEmbeds):
            return
        with DecodeStats(media_index) as stats:
            if isinstance(media, PlannedSound):
                made = self._heard(media, stats)
            else:
                made = self._chosen(media, choice, stats) if choice else self._decoded(media, stats)
            async with aclosing(made) as slices:
                async for each in slices:
                    if repeats:
                        each = await asyncio.to_thread(repeats.of, each)
                    shared = bool(sender and each.memory and await sender.send(each.memory, each.pixels.nbytes))
                    for response in frames_responses(media_index, each, shared):
                        await queue.put(response)

    async def _heard(self, sound: PlannedSound, stats: DecodeStats) -> AsyncGenerator[Slice]:
        """The features of a sound, as its one slice."""
        async with self._decoding_queue.stream(SoundFeatures(sound)) as made:
            async for each in made:
                stats.count(each)
                yield each

    async def _chosen(self, media: PlannedVideo, choice: TokenChoice, stats: DecodeStats) -> AsyncGenerator[Slice]:
        """The tokens that are kept of each slice."""
        skipped = choice.skip()
        for each in skipped:
            yield each
        held = deque[bool]()  # of each slice that `choice` deferred
        try:
            async with aclosing(self._decoded(media, stats, len(skipped))) as slices:
                async for each in slices:
                    holds = choice.defers and self._holding.try_reserve(choice.slice_bytes)
                    if choice.defers:
                        held.append(holds)
                    if ready := await in_thread(partial(choice.take, each, holds)):
                        yield ready
            numbers = await asyncio.to_thread(choice.choose)
            async with aclosing(self._decoded(media.only(numbers), stats)) as slices:
                for count in range(1 + len(numbers)):
                    rest = choice.rest(await anext(slices) if count else None)
                    while ready := await asyncio.to_thread(next, rest, None):
                        yield ready
                        self._holding.release(held.popleft() * choice.slice_bytes)
        finally:
            self._holding.release(sum(held) * choice.slice_bytes)

    async def _decoded(self, media: PlannedVideo, stats: DecodeStats, begin: int = 0) -> AsyncGenerator[Slice]:
        """The whole slices of an item, from slice `begin` on."""
        async with self._decoding.slices_of(VideoSlices(media, begin)) as slices:
            async for each in slices:
                stats.count(each)
                count_frames(each)
                add_request_stats(frames=len(each.pixels))
                yield each


async def _receive(
    requests: Requests, prompt: prompt_pb2.Prompt, conversation: Conversation, received: ExitStack
) -> Conversation:
    """The conversation with the files that follow the prompt. `received` closes them."""
    files: dict[str, ReceivedFile] = {}
    async for name, piece in received_pieces(requests, prompt):
        if name not in files:
            files[name] = ReceivedFile(name)
            received.callback(files[name].close)
        await in_thread(partial(files[name].write, piece))
    return conversation.with_sources({name: file.source() for name, file in files.items()})


def _close_files(job: asyncio.Future[PlannedPrompt]) -> None:
    if not job.cancelled() and job.exception() is None:
        job.result().files.close()


SERVICE = preprocessing_pb2.DESCRIPTOR.services_by_name["PreprocessingService"].full_name
