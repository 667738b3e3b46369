"""POST /v1/chat/completions: a question to generation, answered whole or as server-sent events."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from common.contract.errors import FramesieveError
from framesieve.client.answer import Answer, Delta, Finished, Timings, Usage
from services.gateway.chat.completion import Completion, chunks
from services.gateway.chat.content import conversation
from services.gateway.chat.options import options_of
from services.gateway.chat.request import parse
from services.gateway.files import Uploads
from services.gateway.http.errors import body_of
from services.gateway.questions import Question, Questions, ServerSent, server_sent


class ChatCompletions:
    def __init__(self, questions: Questions) -> None:
        self._questions = questions

    async def endpoint(self, request: Request) -> Response:
        return await self._questions.answer(request, _translated)


def _translated(body: bytearray, uploads: Uploads) -> Question:
    chat = parse(body)
    include_usage = chat.stream_options is not None and chat.stream_options.include_usage
    return Question(
        model=chat.model,
        is_streamed=bool(chat.stream),
        messages=conversation(chat, uploads),
        options=options_of(chat),
        telling=lambda request_id, model: _Told(Completion(request_id, model), include_usage),
        logged={"user": chat.user, "metadata": chat.metadata},
    )


@dataclass(frozen=True, slots=True)
class _Told:
    """begun: the completions whose first chunk was sent."""

    completion: Completion
    include_usage: bool
    begun: set[int] = field(default_factory=set)

    def whole(self, answer: Answer) -> dict[str, Any]:
        return self.completion.whole(answer)

    def begin(self) -> tuple[()]:
        return ()

    def next(self, event: Delta | Finished) -> Iterator[ServerSent]:
        return map(server_sent, chunks(self.completion, event, self.begun))

    def end(self, usage: Usage, timings: Timings) -> Iterator[ServerSent]:
        if self.include_usage:
            yield server_sent(self.completion.cost(usage, timings))
        yield {"data": "[DONE]"}

    def failed(self, error: FramesieveError) -> ServerSent:
        return server_sent(body_of(error))
