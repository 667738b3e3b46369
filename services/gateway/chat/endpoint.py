"""POST /v1/chat/completions: a question to generation, answered whole or as server-sent events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from framesieve.client.answer import Accepted, Answer, Delta, Finished, Timings, Usage
from framesieve.common.contract.errors import FramesieveError
from framesieve.services.gateway.chat.completion import Completion, chunks, counts
from framesieve.services.gateway.chat.content import conversation
from framesieve.services.gateway.chat.names import FieldNames
from framesieve.services.gateway.chat.options import options_of
from framesieve.services.gateway.chat.request import StreamOptions, parse
from framesieve.services.gateway.files import Uploads
from framesieve.services.gateway.http.errors import body_of
from framesieve.services.gateway.questions import Question, Questions, ServerSent, server_sent


class ChatCompletions:
    def __init__(self, questions: Questions) -> None:
        self._questions = questions

    async def endpoint(self, request: Request) -> Response:
        return await self._questions.answer(request, _translated)


def _translated(body: bytearray, uploads: Uploads) -> Question:
    chat, names = parse(body), FieldNames()
    return Question(
        model=chat.model,
        is_streamed=bool(chat.stream),
        messages=conversation(chat, uploads, names),
        options=options_of(chat, names),
        writer=lambda request_id, model: _ChunkWriter(
            Completion(request_id, model), RunningUsage(chat.stream_options or StreamOptions())
        ),
        logged={"user": chat.user, "metadata": chat.metadata},
        name_of=names.name_of,
    )


class RunningUsage:
    """The `usage` of the chunks of a stream: none, null until the last, or that so far."""

    def __init__(self, options: StreamOptions) -> None:
        self.at_the_end = bool(options.include_usage)
        self._continuous = self.at_the_end and bool(options.continuous_usage_stats)
        self._prompt_tokens = 0
        self._completion_tokens = 0

    def begin(self, usage: Usage) -> None:
        self._prompt_tokens = usage.prompt_tokens

    def of(self, event: Delta | Finished) -> dict[str, Any]:
        """What the chunks of an event have besides."""
        if isinstance(event, Delta):
            self._completion_tokens += len(event.token_ids)
        if not self.at_the_end:
            return {}
        return {"usage": counts(self._prompt_tokens, self._completion_tokens) if self._continuous else None}


@dataclass(frozen=True, slots=True)
class _ChunkWriter:
    """begun: the completions whose first chunk was sent."""

    completion: Completion
    running: RunningUsage
    begun: set[int] = field(default_factory=set)

    def whole(self, answer: Answer) -> dict[str, Any]:
        return self.completion.whole(answer)

    def begin(self, accepted: Accepted) -> tuple[()]:
        self.running.begin(accepted.usage)
        return ()

    def next(self, event: Delta | Finished) -> Iterator[ServerSent]:
        so_far = self.running.of(event)
        return (server_sent(chunk | so_far) for chunk in chunks(self.completion, event, self.begun))

    def end(self, usage: Usage, timings: Timings) -> Iterator[ServerSent]:
        if self.running.at_the_end:
            yield server_sent(self.completion.cost(usage, timings))
        yield {"data": "[DONE]"}

    def failed(self, error: FramesieveError) -> ServerSent:
        return server_sent(body_of(error))
