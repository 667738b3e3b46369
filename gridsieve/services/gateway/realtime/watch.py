"""POST /v1/gridsieve/live: a camera is watched and asked about, and server-sent events tell what is seen.

The body is the session of a `session.update` with a source, and the events are those of Realtime: for applications that
have no WebSocket, or nothing more to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.gateway.http.body import BodyLimit, read_body, unless_left
from gridsieve.services.gateway.http.errors import in_words
from gridsieve.services.gateway.http.fields import parsed
from gridsieve.services.gateway.http.request_guard import Call
from gridsieve.services.gateway.models import Models, Named
from gridsieve.services.gateway.questions import PING_S, ServerSent
from gridsieve.services.gateway.realtime import options
from gridsieve.services.gateway.realtime.answers import Answers
from gridsieve.services.gateway.realtime.events import Names, ServerEvent, dumped, error_event, session_object
from gridsieve.services.gateway.realtime.live import Generation
from gridsieve.services.gateway.realtime.request import SessionFields
from gridsieve.v1.generation_pb2 import STREAM_STATE_ENDED


class Watch:
    def __init__(self, generation: Generation, models: Models, body_limit: BodyLimit) -> None:
        self._generation = generation
        self._models = models
        self._body_limit = body_limit

    async def endpoint(self, request: Request) -> Response:
        call = Call.of(request)
        body = await read_body(request, self._body_limit, call.charge)
        fields = await asyncio.to_thread(parsed, SessionFields, body)
        if not fields.source:
            raise InvalidRequest(field="gridsieve.source", limit="the URL of a camera")
        model = await unless_left(request, self._models.find(fields.model, call.metadata))
        names = Names()
        events = self._events(call, fields, model, names)
        # Errors up to here have their HTTP status.
        created = await unless_left(request, anext(events))
        return EventSourceResponse(_sent(created, events, call, names), ping=PING_S, sep="\n")

    async def _events(
        self, call: Call, fields: SessionFields, model: Named, names: Names
    ) -> AsyncGenerator[ServerEvent]:
        """Until the source has ended and what was asked is answered."""
        async with self._generation.live(call) as live:
            with in_words(_name_of):
                opened = await asyncio.to_thread(options.open_message, fields, call.request_id, model.adapter)
                await live.open(opened)
                answers = Answers(names)
                answers.opened(fields, opened)
                yield names.event("session.created", session=session_object(names.new("sess"), model.name, fields))
                async for response in live.responses():
                    for event in answers.events(response):
                        yield event
                    if response.stream.state == STREAM_STATE_ENDED:
                        await live.close()


async def _sent(
    created: ServerEvent, events: AsyncGenerator[ServerEvent], call: Call, names: Names
) -> AsyncGenerator[ServerSent]:
    """An error is the last of them."""
    try:
        yield await _server_sent(created)
        async with aclosing(events), aclosing(call.drain.until_over(events)) as limited:
            async for event in limited:
                yield await _server_sent(event)
    except Exception as error:
        yield await _server_sent(error_event(names, call.outcome.refuse(error, call.method), None))


async def _server_sent(event: ServerEvent) -> ServerSent:
    return {"event": event["type"], "data": await asyncio.to_thread(dumped, event)}


def _name_of(field: str) -> str:
    """The body's name of a field of gRPC's messages."""
    return options.name_of(field).removeprefix("session.")
