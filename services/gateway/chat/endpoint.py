"""POST /v1/chat/completions: a question to generation, answered whole or as server-sent events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

import structlog
from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from common.contract.limits import REQUEST_OVERHEAD_BYTES
from common.telemetry.logs import add_request_stats
from framesieve.client.answer import Accepted, Delta, Event, Finished, Progress, Usage, cost_of
from framesieve.client.client import FramesieveClient
from framesieve.client.prompt import Message
from services.gateway.chat.completion import Completion, chunks, counts
from services.gateway.chat.content import conversation
from services.gateway.chat.names import FieldNames
from services.gateway.chat.options import options_of
from services.gateway.chat.request import ChatRequest, StreamOptions, parse
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
        names = FieldNames()
        chat, messages = await asyncio.to_thread(self._parsed, body, call.owner, names)
        del body
        structlog.contextvars.bind_contextvars(
            **{name: value for name in ("user", "metadata") if (value := getattr(chat, name))}
        )
        model = await unless_left(request, self._models.find(chat.model, call.metadata))
        options = options_of(chat, call.request_id, model.adapter, names)
        completion = Completion(call.request_id, model.name)
        if not chat.stream:
            with names.told():
                answer = await unless_left(request, self._client.answer(messages, options, metadata=call.metadata))
            _count(answer.usage)
            return JSONResponse(completion.whole(answer))
        events = self._client.events(messages, options, metadata=call.metadata)
        # Errors up to here, among them all of the prompt, have their HTTP status.
        with names.told():
            accepted = await unless_left(request, anext(events))
        assert isinstance(accepted, Accepted)
        running = RunningUsage(chat.stream_options or StreamOptions(), accepted.usage.prompt_tokens)
        return EventSourceResponse(_sent(completion, events, running, call, names), ping=_PING_S, sep="\n")

    def _parsed(self, body: bytearray, owner: str, names: FieldNames) -> tuple[ChatRequest, list[Message]]:
        chat = parse(body)
        return chat, conversation(chat, partial(self._files.server_path, owner=owner), names)


class RunningUsage:
    """The `usage` of the chunks of a stream: none, null until the last, or that so far."""

    def __init__(self, options: StreamOptions, prompt_tokens: int) -> None:
        self.at_the_end = bool(options.include_usage)
        self._continuous = self.at_the_end and bool(options.continuous_usage_stats)
        self._prompt_tokens = prompt_tokens
        self._completion_tokens = 0

    def of(self, event: Delta | Finished) -> dict[str, Any]:
        """What the chunks of an event have besides."""
        if isinstance(event, Delta):
            self._completion_tokens += len(event.token_ids)
        if not self.at_the_end:
            return {}
        return {"usage": counts(self._prompt_tokens, self._completion_tokens) if self._continuous else None}


async def _sent(
    completion: Completion, events: AsyncGenerator[Event], running: RunningUsage, call: Call, names: FieldNames
) -> AsyncGenerator[dict[str, str]]:
    """The server-sent events of a stream whose first event was read. An error is the last of them."""
    begun: set[int] = set()
    finished: list[Finished] = []
    try:
        with names.told():
            async with aclosing(events):
                async for event in events:
                    if isinstance(event, Finished):
                        finished.append(event)
                    if not isinstance(event, Accepted | Progress):
                        usage_so_far = running.of(event)
                        for chunk in chunks(completion, event, begun):
                            yield _data(chunk | usage_so_far)
        usage, timings = cost_of(finished)
        _count(usage)
        if running.at_the_end:
            yield _data(completion.cost(usage, timings))
        yield {"data": "[DONE]"}
    except (asyncio.CancelledError, GeneratorExit):
        call.outcome.code = "CANCELLED"
        raise
    except Exception as error:
        yield _data(body_of(call.outcome.refuse(error, call.method)))


def _data(value: object) -> dict[str, str]:
    # In ASCII: some clients split lines at U+0085, U+2028 and U+2029, too.
    return {"data": json.dumps(value, separators=(",", ":"))}


def _count(usage: Usage) -> None:
    add_request_stats(
        prompt_tokens_full=usage.prompt_tokens_full,
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
    )
