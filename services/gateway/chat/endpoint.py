"""POST /v1/chat/completions: a question to generation, answered whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

import structlog
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from common.contract.limits import REQUEST_OVERHEAD_BYTES
from common.telemetry.logs import add_request_stats
from framesieve.client.answer import Accepted, Event, Finished, Progress, Usage, cost_of
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Message
from services.gateway.chat.completion import Completion, chunks
from services.gateway.chat.content import conversation
from services.gateway.chat.options import options_of
from services.gateway.chat.request import ChatRequest, parse
from services.gateway.files import Files
from services.gateway.http.body import read_body, unless_left
from services.gateway.http.errors import body_of
from services.gateway.http.request_guard import Call
from services.gateway.models import Models

_PING_S = 15


class ChatCompletions:
    """max_inline_bytes: of media in a request; in the body they are base64."""

    def __init__(self, client: FramesieveClient, models: Models, files: Files, max_inline_bytes: int) -> None:
        self._client = client
        self._models = models
        self._files = files
        self.max_body_bytes = max_inline_bytes * 4 // 3 + REQUEST_OVERHEAD_BYTES

    async def endpoint(self, request: Request) -> Response:
        call = Call.of(request)
        body = await read_body(request, self.max_body_bytes, call.charge)
        chat, messages = await asyncio.to_thread(self._parsed, body, call.owner)
        del body
        structlog.contextvars.bind_contextvars(
            **{name: value for name in ("user", "metadata") if (value := getattr(chat, name))}
        )
        model = await unless_left(request, self._models.find(chat.model, call.metadata))
        options = options_of(chat, call.request_id, model.adapter)
        completion = Completion(call.request_id, model.name)
        if not chat.stream:
            answer = await unless_left(request, self._client.answer(messages, options, metadata=call.metadata))
            _count(answer.usage)
            return JSONResponse(completion.whole(answer))
        include_usage = chat.stream_options is not None and chat.stream_options.include_usage
        events = self._client.events(messages, options, metadata=call.metadata)
        # Errors up to here, among them all of the prompt, have their HTTP status.
        await unless_left(request, anext(events))
        return EventSourceResponse(_sent(completion, events, include_usage, call), ping=_PING_S, sep="\n")

    def _parsed(self, body: bytearray, owner: str) -> tuple[ChatRequest, list[Message]]:
        chat = parse(body)
        return chat, conversation(chat, partial(self._files.server_path, owner=owner))


async def _sent(
    completion: Completion, events: AsyncGenerator[Event], include_usage: bool, call: Call
) -> AsyncGenerator[dict[str, str]]:
    """The server-sent events of a stream whose first event was read. An error is the last of them."""
    begun: set[int] = set()
    finished: list[Finished] = []
    try:
        async with aclosing(events), aclosing(call.drain.until_over(events)) as limited:
            async for event in limited:
                if isinstance(event, Finished):
                    finished.append(event)
                if not isinstance(event, Accepted | Progress):
                    for chunk in chunks(completion, event, begun):
                        yield _data(chunk)
        usage, timings = cost_of(finished)
        _count(usage)
        if include_usage:
            yield _data(completion.cost(usage, timings))
        yield {"data": "[DONE]"}
    except (asyncio.CancelledError, GeneratorExit):
        call.outcome.code = "CANCELLED"
        raise
    except Exception as error:
        yield _data(body_of(call.outcome.refuse(error, call.method)))


def _data(value: object) -> dict[str, str]:
    return {"data": json.dumps(value, ensure_ascii=False, separators=(",", ":"))}


def _count(usage: Usage) -> None:
    add_request_stats(
        prompt_tokens_full=usage.prompt_tokens_full,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
    )
