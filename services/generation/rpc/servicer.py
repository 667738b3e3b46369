"""GenerationService: a request's way from its arrival to the end of its answer.

It owns the order of a stream's messages, the request's clock and its limits. What the media hold, when the request
runs and which tokens it gets is told by others: the media session, in this loop, and the engine, from its own thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from time import monotonic_ns
from typing import TypeAlias

import grpc
import structlog

from common.channels import passed_on
from common.contract.errors import InvalidRequest
from common.security.credentials import NO_CREDENTIALS, Credentials
from common.serving.interceptors import MAX_REQUEST_ID_CHARACTERS, bound_request_id, is_request_id
from common.telemetry.request_stats import add_request_stats
from framesieve.v1 import generation_pb2, generation_pb2_grpc
from framesieve.v1.generation_pb2 import GenerateRequest, GenerateResponse
from services.generation.engine.engine import Engine
from services.generation.model.adapters import NO_ADAPTERS, Adapters
from services.generation.request.encoded_media import MediaItem
from services.generation.request.request import Event, Failed, Finished, PrefillStarted, Request, Tokens
from services.generation.rpc.media import MediaClient, MediaSession, Progress
from services.generation.rpc.messages import (
    accepted_response,
    delta_response,
    finished_response,
    progress_response,
    sampling_request,
    usage_message,
)
from services.generation.rpc.metrics import (
    GENERATED_TOKENS,
    count_answer,
    count_first_token,
    count_next_token,
    count_prompt,
)
from services.generation.rpc.prompt_limit import PromptLimit
from services.generation.rpc.timing import Stage, StageClock, record_stages
from services.generation.sampling.defaults import SamplingDefaults
from services.generation.sampling.detokenizer import Detokenizer, Tokenizer
from services.generation.sampling.sampler import SamplingParams

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

Context: TypeAlias = grpc.aio.ServicerContext[GenerateRequest, GenerateResponse]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Answers with one engine.

    defaults: the checkpoint's. limit: of prompt and answer together. credentials: whose token is shown upstream.
    adapters: those that requests may name.
    """

    def __init__(
        self,
        engine: Engine,
        media: MediaClient,
        tokenizer: Tokenizer,
        defaults: SamplingDefaults,
        limit: PromptLimit,
        credentials: Credentials = NO_CREDENTIALS,
        adapters: Adapters = NO_ADAPTERS,
    ) -> None:
        self._engine = engine
        self._media = media
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._limit = limit
        self._credentials = credentials
        self._adapters = adapters

    async def Generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[GenerateResponse]:
        clock = StageClock()
        request_id = _request_id(request.request_id)
        wanted = sampling_request(request.sampling)
        adapter = self._adapters.find(request.adapter) if request.HasField("adapter") else None
        if adapter:
            structlog.contextvars.bind_contextvars(adapter=adapter.name)
        call = passed_on(context, self._credentials)
        async with self._media.open(request.prompt, request.pruning, clock, **call) as session:
            del request  # its media may be large, and the session lets go of them once theirs have arrived
            plan, prunings, kept_counts = session.plan, session.prunings, session.kept_counts
            room = self._limit.room(plan, prunings, kept_counts, wanted.max_new_tokens)
            usage = usage_message(plan, prunings, kept_counts)
            first, *others = wanted.resolve(self._defaults, room)
            events = Events(1 + len(others))
            keys, listener = session.media_keys, events.listener
            question = Request(
                request_id, plan, kept_counts, keys, first, self._detokenizer(first), listener(0), adapter=adapter
            )
            for index, each in enumerate(others, 1):
                question.add_sibling(f"{request_id}#{index}", each, self._detokenizer(each), listener(index))
            answers = (question, *question.siblings)
            # Submitted before its media is selected: the text before them is prefilled meanwhile.
            self._engine.submit(question)
            _note_repairs(usage, question)
            if not question.wanted_media:
                clock.skip(Stage.TRANSFER)
            fetching = asyncio.create_task(self._fetch(session, clock, question, usage, events))
            try:
                count_prompt(usage.prompt_tokens_full, usage.prompt_tokens, plan.media, prunings, kept_counts)
                add_request_stats(
                    media=len(plan.media),
                    prompt_tokens_full=usage.prompt_tokens_full,
                    prompt_tokens=usage.prompt_tokens,
                )
                yield accepted_response(request_id, usage)
                unfinished = len(answers)
                told_ns: dict[int, int] = {}  # when each answer's last token came
                while unfinished:
                    at_ns, index, event = await events.get()
                    match event:
                        case Progress():
                            yield progress_response(event)
                        case PrefillStarted():
                            clock.finish(Stage.WAIT_FOR_PREFILL, at_ns)
                        case Tokens():
                            if clock.token(at_ns):
                                count_first_token(clock, question.cached_tokens)
                                first_token_ms = clock.first_token_ns // 10**6
                                add_request_stats(
                                    cached_prompt_tokens=question.cached_tokens, first_token_ms=first_token_ms
                                )
                            if index in told_ns:
                                count_next_token(at_ns - told_ns[index])
                            told_ns[index] = at_ns
                            GENERATED_TOKENS.inc(len(event.token_ids))
                            add_request_stats(completion_tokens=len(event.token_ids))
                            yield delta_response(event, index)
                        case Finished():
                            unfinished -= 1
                            count_answer(event.reason)
                            usage.completion_tokens = event.completion_tokens
                            usage.cached_prompt_tokens = question.cached_tokens
                            yield finished_response(event.reason, usage, clock, index)
                        case Failed():
                            raise event.error
                        case Exception():
                            raise event
            except BaseException as error:
                record_stages(clock, error)
                raise
            else:
                record_stages(clock)
            finally:
                for answer in answers:
                    self._engine.cancel(answer)
                fetching.cancel()
                await asyncio.wait([fetching])

    def _detokenizer(self, sampling: SamplingParams) -> Detokenizer:
        return Detokenizer(self._tokenizer, sampling.stop)

    async def _fetch(
        self, session: MediaSession, clock: StageClock, question: Request, usage: generation_pb2.Usage, events: Events
    ) -> None:
        """Brings the media that the engine lacks; what goes wrong becomes an event."""
        try:
            await self._deliver(session, clock, question, usage, events)
            # A reader that is slow, or has stopped, must not keep room that the engine no longer needs.
            await events.ended.wait()
            await session.give_room_back()
        except Exception as error:
            events.put(error)

    async def _deliver(
        self, session: MediaSession, clock: StageClock, question: Request, usage: generation_pb2.Usage, events: Events
    ) -> None:
        """On its own, for what is left at the end names the last item, whose embeddings are large."""
        async for arrival in session.receive(question.wanted_media, clock):
            if isinstance(arrival, MediaItem):
                usage.media[arrival.media_index].repaired_frames = arrival.repaired_frames
                self._engine.deliver(question, arrival)
            else:
                events.put(arrival)


class Events:
    """What happens to the answers of one request, in order, each with the time at which it did and its answer's index.

    It never makes the engine wait.
    ended: set once the engine is done with all of them, whether or not anybody has read so far.
    """

    def __init__(self, answers: int) -> None:
        self.ended = asyncio.Event()
        self._unfinished = answers
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, int, Event | Progress | Exception]] = asyncio.Queue()

    def put(self, event: Progress | Exception) -> None:
        self._queue.put_nowait((monotonic_ns(), 0, event))

    def listener(self, index: int) -> Callable[[Event], None]:
        """What takes an answer's events in the engine's thread. The time is the engine's, not a busy loop's."""

        def listen(event: Event) -> None:
            self._loop.call_soon_threadsafe(self._take, monotonic_ns(), index, event)

        return listen

    async def get(self) -> tuple[int, int, Event | Progress | Exception]:
        return await self._queue.get()

    def _take(self, at_ns: int, index: int, event: Event) -> None:
        self._queue.put_nowait((at_ns, index, event))
        if isinstance(event, Finished | Failed):
            self._unfinished -= 1
            if not self._unfinished:
                self.ended.set()


def _note_repairs(usage: generation_pb2.Usage, question: Request) -> None:
    """Of media that the cache holds, which do not come again."""
    for media, answer in zip(usage.media, question.encoded_media, strict=True):
        if answer:
            media.repaired_frames = answer.repaired_frames


def _request_id(given: str) -> str:
    """The caller's; without one, the call's own. Logs and upstream calls go by it from here on."""
    if not given:
        return bound_request_id()
    if not is_request_id(given):
        raise InvalidRequest(
            f"request_id must be at most {MAX_REQUEST_ID_CHARACTERS} printable ASCII characters, got {given[:200]!r}"
        )
    structlog.contextvars.bind_contextvars(request_id=given)
    return given
