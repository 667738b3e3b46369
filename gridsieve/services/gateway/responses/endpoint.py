"""POST /v1/responses: a question to generation, answered whole or as server-sent events; GET and DELETE of one."""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gridsieve.services.gateway.chat.options import check_captions
from gridsieve.services.gateway.files import Uploads
from gridsieve.services.gateway.http.body import BodyLimit
from gridsieve.services.gateway.http.errors import LARGER_BODIES
from gridsieve.services.gateway.http.request_guard import Call
from gridsieve.services.gateway.questions import Question, Questions
from gridsieve.services.gateway.responses.earlier import asked_of, continued, response_of
from gridsieve.services.gateway.responses.options import options_of
from gridsieve.services.gateway.responses.request import FORMAT, parse
from gridsieve.services.gateway.responses.response import ResponseWriter, repeated
from gridsieve.services.gateway.responses.store import (
    CONVERSATION_BYTES,
    RESPONSE_BYTES,
    STORE_BYTES,
    ResponseStore,
    Stored,
)
from gridsieve.services.gateway.responses.turns import names_of, turns_of

_OF_STORE = BodyLimit(CONVERSATION_BYTES, f"the gateway stores {STORE_BYTES} of all callers", LARGER_BODIES)


class Responses:
    def __init__(self, questions: Questions) -> None:
        self._questions = questions
        self._store = ResponseStore()

    async def endpoint(self, request: Request) -> Response:
        """POST /v1/responses."""
        owner = Call.of(request).owner
        return await self._questions.answer(request, partial(self._translated, owner=owner))

    async def response_endpoint(self, request: Request) -> Response:
        """GET and DELETE /v1/responses/{response_id}."""
        response_id = request.path_params["response_id"]
        found = response_of(response_id, self._store, Call.of(request).owner)
        if request.method == "DELETE":
            self._store.delete(response_id)
            return JSONResponse({"id": response_id, "object": "response", "deleted": True})
        return Response(found.answered, media_type="application/json")

    def _translated(self, body: bytearray, uploads: Uploads, owner: str) -> Question:
        """The question in a body. Raises InvalidRequest."""
        limit = min(self._questions.body_limit, _OF_STORE, key=lambda limit: limit.size_bytes)
        found = continued(parse(body), self._store, owner, limit)
        request, turns = found.request, turns_of(found.request, found.earlier, uploads)
        messages = [turn.message for turn in turns]
        if request.moments:
            check_captions(request.moments, messages, FORMAT)
        keep = None
        if request.store is not False and len(body) <= RESPONSE_BYTES:
            keep = partial(self._keep, owner, request.previous_response_id, asked_of(request))
        fields = repeated(request)
        return Question(
            model=request.model,
            is_streamed=bool(request.stream),
            messages=messages,
            options=options_of(request),
            writer=lambda _, model: ResponseWriter(fields, model, keep, request.moments),
            logged={"user": request.user, "metadata": request.metadata},
            name_of=names_of(turns).name_of,
            stored_bytes=found.stored_bytes,
        )

    def _keep(self, owner: str, previous: str | None, asked: bytes, told: dict[str, Any]) -> bool:
        return self._store.keep(told["id"], Stored(owner, previous, asked, to_json(told)))
