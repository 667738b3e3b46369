"""The path of a question over HTTP, which all endpoints share: parse the body, ask generation, send the answer.

    body ── translated ──> Question ── generation ──> Answer or Events ── AnswerWriter ──> JSON or server-sent events

It knows no fields of an API. The folder of each API translates bodies to questions and has an AnswerWriter.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeAlias

import structlog
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gridsieve.client.answer import Accepted, Answer, Delta, Event, Finished, Progress, Timings, Usage, cost_of
from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Message, Options
from gridsieve.common.contract.errors import GridsieveError
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.services.gateway.files import Files, Uploads
from gridsieve.services.gateway.http.body import BodyLimit, read_body, unless_left
from gridsieve.services.gateway.http.errors import in_words
from gridsieve.services.gateway.http.request_guard import Call
from gridsieve.services.gateway.models import Models

PING_S = 15

ServerSent: TypeAlias = dict[str, str]
"""A server-sent event: its `data` and, where the API names its events, its `event`."""


class AnswerWriter(Protocol):
    """Writes one answer in the format of an API: `whole`, or as a stream: `begin`, `next`*, then `end` or `failed`."""

    def whole(self, answer: Answer) -> dict[str, Any]: ...

    def begin(self, accepted: Accepted) -> Iterable[ServerSent]: ...

    def next(self, event: Delta | Finished) -> Iterable[ServerSent]: ...

    def end(self, usage: Usage, timings: Timings) -> Iterable[ServerSent]: ...

    def failed(self, error: GridsieveError) -> ServerSent: ...


@dataclass(frozen=True, slots=True)
class Question:
    """A body, translated. options: without the request's id and adapter, which are added.

    writer: makes the writer of its answer from the request's id and the model's name. logged: for the gateway's log.
    name_of: the field of the body, by that of the gRPC request. stored_bytes: of earlier messages that are not in the
    body.
    """

    model: str | None
    is_streamed: bool
    messages: list[Message]
    options: Options
    writer: Callable[[str, str], AnswerWriter]
    logged: Mapping[str, object] = field(default_factory=dict)
    name_of: Callable[[str], str] = str
    stored_bytes: int = 0


class Questions:
    """max_inline_bytes: of media in a request; in the body they are base64."""

    def __init__(self, client: GridsieveClient, models: Models, files: Files, max_inline_bytes: int) -> None:
        self._client = client
        self._models = models
        self._files = files
        self.max_inline_bytes = max_inline_bytes
        self.body_limit = BodyLimit.inline(max_inline_bytes)

    async def answer(self, request: Request, translated: Callable[[bytearray, Uploads], Question]) -> Response:
        """translated: runs in a thread; raises InvalidRequest."""
        call = Call.of(request)
        body = await read_body(request, self.body_limit, call.charge)
        uploads = partial(self._files.url, owner=call.owner)
        question = await asyncio.to_thread(translated, body, uploads)
        del body
        call.charge_stored(question.stored_bytes)
        structlog.contextvars.bind_contextvars(**{name: value for name, value in question.logged.items() if value})
        model = await unless_left(request, self._models.find(question.model, call.metadata))
        writer = question.writer(call.request_id, model.name)
        options = Options(**question.options, request_id=call.request_id, adapter=model.adapter)
        with in_words(question.name_of):
            events = _counted(self._client.events(question.messages, options, metadata=call.metadata))
            if not question.is_streamed:
                answer = await unless_left(request, self._client.collected(events, options))
                return JSONResponse(writer.whole(answer))
            # Errors up to here, among them all of the prompt, have their HTTP status.
            accepted = await unless_left(request, anext(events))
        assert isinstance(accepted, Accepted)
        return EventSourceResponse(_sent(writer, accepted, events, question.name_of, call), ping=PING_S, sep="\n")


async def _sent(
    writer: AnswerWriter, accepted: Accepted, events: AsyncGenerator[Event], name_of: Callable[[str], str], call: Call
) -> AsyncGenerator[ServerSent]:
    """The server-sent events of a stream whose first event was read. An error is the last of them."""
    finished: list[Finished] = []
    try:
        for sent in writer.begin(accepted):
            yield sent
        async with aclosing(events), aclosing(call.drain.until_over(events)) as limited:
            with in_words(name_of):
                async for event in limited:
                    if isinstance(event, Finished):
                        finished.append(event)
                    if not isinstance(event, Accepted | Progress):
                        for sent in writer.next(event):
                            yield sent
        for sent in writer.end(*cost_of(finished)):
            yield sent
    except (asyncio.CancelledError, GeneratorExit):
        call.outcome.code = "CANCELLED"
        raise
    except Exception as error:
        yield writer.failed(call.outcome.refuse(error, call.method))


def server_sent(value: object, name: str | None = None) -> ServerSent:
    """The event of a JSON value, in ASCII: some clients split lines at U+0085, U+2028 and U+2029, too."""
    data = json.dumps(value, separators=(",", ":"))
    return {"data": data} if name is None else {"event": name, "data": data}


async def _counted(events: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
    """The events, whose tokens it counts for the request, however that ends."""
    usage: Usage | None = None
    completion_tokens = 0
    try:
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Delta):
                    completion_tokens += len(event.token_ids)
                elif isinstance(event, Accepted | Finished):
                    usage = event.usage
                yield event
    finally:
        if usage is not None:
            add_request_stats(
                prompt_tokens_full=usage.prompt_tokens_full,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=completion_tokens,
            )
