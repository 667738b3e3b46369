"""GenerationService: serves a request from its arrival to the end of its answers.

It owns the order of messages in a response stream, the request's clock and its limits. Media come from a `MediaCall`,
in this event loop; tokens come from the engine, in the engine's thread.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from functools import partial
from typing import Any, TypeAlias

import grpc
import numpy as np
import structlog

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.wire import pruning_message
from gridsieve.common.security.credentials import NO_CREDENTIALS, Credentials
from gridsieve.common.security.quotas import charge_of_request
from gridsieve.common.serving.interceptors import passed_on
from gridsieve.common.serving.observed import MAX_REQUEST_ID_CHARACTERS, bound_request_id, is_request_id
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.common.yielding import begin_call
from gridsieve.services.generation.answers.events import Events, Inbox
from gridsieve.services.generation.answers.messages import response_of, sampling_request
from gridsieve.services.generation.answers.moments import ToldMoments
from gridsieve.services.generation.answers.reading import row_of
from gridsieve.services.generation.answers.text import Answers
from gridsieve.services.generation.engine.engine import Engine
from gridsieve.services.generation.live.call import LiveCall
from gridsieve.services.generation.live.service import LiveService
from gridsieve.services.generation.live.sessions import LiveSessions
from gridsieve.services.generation.live.source_metrics import Sources
from gridsieve.services.generation.request.encoded_media import MediaItem
from gridsieve.services.generation.request.pruned_prompt import PrunedPrompt
from gridsieve.services.generation.request.reader import ONE_ROW, Reader
from gridsieve.services.generation.request.request import Adapter, Request
from gridsieve.services.generation.rpc.messages import method_message, note_item, usage_message
from gridsieve.services.generation.rpc.metrics import count_prompt
from gridsieve.services.generation.rpc.prompts import NameOf, callers_fields, embed_prompt, score_prompt
from gridsieve.services.generation.sampling.answer_reader import AnswerReader
from gridsieve.services.generation.sampling.rows import Float32Array
from gridsieve.services.generation.sampling.tool_calls import ToolUse
from gridsieve.services.generation.served_model import ServedModel
from gridsieve.services.generation.stage_clock import Stage, StageClock, record_stages
from gridsieve.services.generation.upstream.media import MediaCall, MediaClient
from gridsieve.v1 import generation_pb2, generation_pb2_grpc, prompt_pb2
from gridsieve.v1.generation_pb2 import GenerateRequest, GenerateResponse, LiveRequest, LiveResponse

# As `torch.nn.functional.normalize`.
_LEAST_NORM = 1e-12

SERVICE = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

Context: TypeAlias = grpc.aio.ServicerContext[GenerateRequest, GenerateResponse]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Serves requests with one engine.

    model: what the engine runs. credentials: sent upstream. picture_bytes: maximum of all live sessions.
    """

    def __init__(
        self,
        engine: Engine,
        media: MediaClient,
        model: ServedModel,
        credentials: Credentials = NO_CREDENTIALS,
        picture_bytes: int = 2**30,
    ) -> None:
        self._engine = engine
        self._media = media
        self._model = model
        self._credentials = credentials
        self._inbox = Inbox()
        blocks = model.live.tokens // model.live.block_tokens if model.live else 0
        sessions = LiveSessions(picture_bytes, blocks)
        self._live = LiveService(engine, media, model, self._inbox, Sources(), sessions)

    async def ListModels(
        self, request: generation_pb2.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[generation_pb2.ListModelsResponse]:
        names = [(name, False) for name in self._model.names]
        names += [(name, True) for name in self._model.adapters.names]
        for name, is_adapter in names:
            yield generation_pb2.ListModelsResponse(
                name=name,
                adapter=is_adapter,
                max_model_len=self._model.limit.tokens,
                pruning=pruning_message(self._model.pruning),
                pruning_methods=map(method_message, self._model.pruning_methods),
                task=f"TASK_{self._model.task.upper()}",
                instruction=self._model.reads.instruction if self._model.reads else "",
                sounds=self._model.sounds,
            )

    async def Generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[GenerateResponse]:
        clock, model = StageClock(), self._model
        model.check_task("generate")
        request_id = _request_id(request.request_id)
        wanted = sampling_request(request)
        self._check_tools(request.prompt, wanted.tool_use)
        adapter = model.adapters.find(request.adapter) if request.HasField("adapter") else None
        grammar, bad_words = await model.constraints(wanted)
        if adapter:
            structlog.contextvars.bind_contextvars(adapter=adapter.name)
        passed = passed_on(context, self._credentials)
        pruning = model.completed(request.pruning)
        opening = self._media.open(request.prompt, pruning, clock, adapter, **passed)
        salt, yields = request.prompt.cache_salt, request.prompt.yields
        begin_call(yields)
        del request  # files may be large; the call upstream drops them once all encoded media have arrived
        async with opening as call:
            plan, prunings, num_kept = call.plan, call.prunings, call.num_kept
            answer_tokens = model.limit.answer_tokens(plan, prunings, num_kept, wanted.max_new_tokens)
            usage = usage_message(plan, prunings, num_kept)
            thought = model.thought_after(plan)
            if thought or wanted.needs_times:
                grammar = await model.grammar_after(thought, wanted, plan)
            first, *others = wanted.resolve(model.defaults, answer_tokens, grammar, bad_words)
            events = Events(self._inbox, 1 + len(others))
            prompt = PrunedPrompt(plan, num_kept, model.defaults.vocab_size, bounded=call.bounded)
            listener = events.listener
            finder = model.stop_finder(first)
            keys = call.media_keys
            question = Request(request_id, prompt, keys, first, finder, listener(0), adapter, salt, yields=yields)
            for index, each in enumerate(others, 1):
                question.add_sibling(f"{request_id}#{index}", each, model.stop_finder(each), listener(index))
            answers = (question, *question.siblings)
            async with self._submitted(call, answers, usage, events, clock):
                accepted = generation_pb2.Accepted(request_id=request_id, usage=usage)
                yield GenerateResponse(accepted=accepted)
                is_split = wanted.tool_use or thought
                readers = [AnswerReader(model.call_form, wanted.tool_use, thought) for _ in answers if is_split]
                told = Answers(question, len(answers), clock, model.tokenizer, readers)
                moments = None
                if wanted.moments:
                    moments = await asyncio.to_thread(ToldMoments, prompt, wanted.moments, model.notation)
                while not told.complete:
                    for part in told.of(await events.next()):
                        response = response_of(part, usage, clock, model.tokenizer)
                        if moments:
                            moments.add(part, response)
                        yield response

    async def Live(
        self, requests: AsyncIterator[LiveRequest], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[LiveResponse]:
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("open"):
            raise InvalidRequest("the first request of a live session must open it")
        self._model.check_task("generate")
        request_id = _request_id(first.open.request_id)
        options = partial(passed_on, context, self._credentials, part=True)
        live = LiveCall(first.open, request_id, self._live, options, charge_of_request())
        task = asyncio.create_task(live.run(requests))
        # Notices a disconnected caller even while a response is being written.
        context.add_done_callback(lambda _: task.cancel())  # type: ignore[arg-type]  # the stub's type is no protocol
        async with aclosing(live.responses.until_done(task)) as made:
            async for response in made:
                yield response

    async def Embed(
        self, request: generation_pb2.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> generation_pb2.EmbedResponse:
        reading, most = self._model.reading("embed"), self._model.input.hidden_size
        size = request.dimensions if request.HasField("dimensions") else most
        if not 1 <= size <= most:
            raise InvalidRequest(field="dimensions", limit=f"1 to {most}", value=size)
        read = self._begin_reading(*embed_prompt(request, reading), request, context)
        del request  # files may be large, as in `Generate`
        row, usage = await read
        values = row[:size].astype(np.float64)
        embedding = values / max(float(np.linalg.norm(values)), _LEAST_NORM)
        return generation_pb2.EmbedResponse(embedding=embedding, request_id=bound_request_id(), usage=usage)

    async def Score(
        self, request: generation_pb2.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> generation_pb2.ScoreResponse:
        read = self._begin_reading(*score_prompt(request, self._model.reading("score")), request, context)
        del request
        row, usage = await read
        score = (1 + math.tanh(float(row[0]) / 2)) / 2  # the logistic function, which overflows nowhere
        return generation_pb2.ScoreResponse(score=score, request_id=bound_request_id(), usage=usage)

    def _begin_reading(
        self,
        prompt: prompt_pb2.Prompt,
        name_of: NameOf,
        request: generation_pb2.EmbedRequest | generation_pb2.ScoreRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> Coroutine[Any, Any, tuple[Float32Array, generation_pb2.Usage]]:
        """Checks the request from which the prompt was made, and returns the coroutine that reads the prompt.

        The coroutine does not refer to the request, whose files may be large.
        """
        clock, request_id = StageClock(), _request_id(request.request_id)
        adapter = self._model.adapters.find(request.adapter) if request.HasField("adapter") else None
        passed, pruning = passed_on(context, self._credentials), self._model.completed(request.pruning)
        opening = self._media.open(prompt, pruning, clock, adapter, **passed)
        begin_call(prompt.yields)
        return self._read(opening, name_of, clock, request_id, adapter, prompt.cache_salt, prompt.yields)

    async def _read(
        self,
        opening: AbstractAsyncContextManager[MediaCall],
        name_of: NameOf,
        clock: StageClock,
        request_id: str,
        adapter: Adapter | None,
        salt: str,
        yields: bool,
    ) -> tuple[Float32Array, generation_pb2.Usage]:
        """What the model reads of a prompt, float32 [W], and the usage."""
        with callers_fields(name_of):
            async with opening as call:
                plan, num_kept = call.plan, call.num_kept
                self._model.limit.answer_tokens(plan, call.prunings, num_kept, 0)
                usage, events = usage_message(plan, call.prunings, num_kept), Events(self._inbox, 1)
                pruned = PrunedPrompt(plan, num_kept, self._model.defaults.vocab_size, bounded=call.bounded)
                keys, listener = call.media_keys, events.listener(0)
                reader = Reader(request_id, pruned, keys, ONE_ROW, None, listener, adapter, salt, yields=yields)
                async with self._submitted(call, (reader,), usage, events, clock):
                    row = await row_of(reader, events, clock)
                    usage.cached_prompt_tokens = reader.cached_tokens
                    return row, usage

    @asynccontextmanager
    async def _submitted(
        self,
        call: MediaCall,
        answers: Sequence[Request],
        usage: generation_pb2.Usage,
        events: Events,
        clock: StageClock,
    ) -> AsyncIterator[None]:
        """The engine computes a request with its siblings, and gets its media, while what is inside reads the events.

        answers: the request and its siblings.
        """
        question, *_ = answers
        # Submitted before its media are selected, so that the text before them is prefilled in the meantime.
        self._engine.submit(question)
        for index, encoded in enumerate(question.encoded_media):
            if encoded:  # the encoder does not send it again
                note_item(usage, index, encoded.kept, encoded.repaired_frames)
        if not question.wanted_media:
            clock.skip(Stage.TRANSFER)
        receiving = asyncio.create_task(self._receive_media(call, question, usage, events))
        try:
            yield
        except BaseException as error:
            record_stages(clock, error)
            raise
        else:
            record_stages(clock)
        finally:
            for answer in answers:
                self._engine.cancel(answer)
            receiving.cancel()
            await asyncio.wait([receiving])

    def _check_tools(self, prompt: prompt_pb2.Prompt, use: ToolUse | None) -> None:
        """Leaves out tools that must not be called. Raises InvalidRequest for those whose calls cannot be read."""
        if use is None:
            prompt.ClearField("tools")
        elif not self._model.call_form:
            why = "the checkpoint's chat template teaches no form of tool calls that is read here"
            raise InvalidRequest(field="prompt.tools", limit=f"empty: {why}")

    async def _receive_media(
        self, call: MediaCall, question: Request, usage: generation_pb2.Usage, events: Events
    ) -> None:
        """Delivers the media that the cache lacks to the engine, part by part. Errors become events."""
        try:
            async for received in call.receive(question.wanted_media):
                if isinstance(received, MediaItem):
                    if received.complete:
                        note_item(usage, received.media_index, received.kept, received.repaired_frames)
                    self._engine.deliver(question, received)
                else:
                    events.put(received)
                del received  # the last item's embeddings must not stay until the request ends
            count_prompt(usage, call.plan.media, call.prunings)
            add_request_stats(
                media=len(usage.media),
                prompt_tokens_full=usage.prompt_tokens_full,
                prompt_tokens=usage.prompt_tokens,
            )
            # Release the bytes now: a slow client must not hold bytes that the engine no longer needs.
            await events.ended.wait()
            await call.release()
        except Exception as error:
            events.put(error)


def _request_id(given: str) -> str:
    """The request's id if it has one, else the call's. Logs and upstream calls carry it from here on."""
    if not given:
        return bound_request_id()
    if not is_request_id(given):
        limit = f"at most {MAX_REQUEST_ID_CHARACTERS} printable ASCII characters"
        raise InvalidRequest(field="request_id", limit=limit, value=given)
    structlog.contextvars.bind_contextvars(request_id=given)
    return given
