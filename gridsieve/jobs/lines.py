"""One request of a job, and the row that it becomes: the lines of OpenAI's Batch API.

    {"custom_id": "a.mp4", "method": "POST", "url": "/v1/chat/completions", "body": {…}}

    {"id": "batch_req_…", "custom_id": "a.mp4",
     "response": {"status_code": 200, "request_id": "…", "body": {…}}, "error": null}

A row has the response to its request, whatever its status, or, if the request could not be sent, the error.
Source: OpenAI's API reference, "batch request input" and "batch request output".
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gridsieve.common.contract.errors import InvalidRequest

CHAT, RESPONSES, EMBEDDINGS = "/v1/chat/completions", "/v1/responses", "/v1/embeddings"
Url: TypeAlias = Literal["/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank", "/v1/score"]
Row: TypeAlias = dict[str, Any]
"""A line of the output."""

_UNSAID: dict[str, dict[str, Any]] = {
    CHAT: {"service_tier": "flex"},
    RESPONSES: {"service_tier": "flex", "store": False},
}
"""What a body says if it says nothing else, by url."""
_VALUE_CHARACTERS = 80
ROW_BEGINS = b'{"id":"batch_req_'
OK = 200


@dataclass(frozen=True, slots=True)
class Line:
    """A request. body: JSON, as it is sent."""

    custom_id: str
    url: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Reply:
    """The response to a request. body: its JSON. retry_after_s: when a refused request may be sent again."""

    status_code: int
    request_id: str
    body: Any
    retry_after_s: float = 1.0

    @property
    def message(self) -> str:
        """What its error says; empty where there is none."""
        error = self.body.get("error") if isinstance(self.body, dict) else None
        return str(error.get("message", "")) if isinstance(error, dict) else ""


class _Fields(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    custom_id: Annotated[str, Field(min_length=1)]
    method: Literal["POST"]
    url: Url
    body: dict[str, Any]


def read_line(data: bytes) -> Line:
    """The request in a line of JSON. Unless its body says otherwise, it yields to other requests (`service_tier` is
    `flex`), and its response is not stored, which would take the place of others (`store` is false).

    Raises InvalidRequest, which names the first wrong field.
    """
    try:
        fields = _Fields.model_validate_json(data)
    except ValidationError as error:
        raise _refusal(error) from None
    return line_of(fields.custom_id, fields.url, fields.body)


def line_of(custom_id: str, url: str, body: dict[str, Any]) -> Line:
    """`read_line` for a request that was made here."""
    if body.get("stream"):
        raise InvalidRequest("must not be true: a row has a whole answer", field="body.stream")
    for name, value in _UNSAID.get(url, {}).items():
        if body.get(name) is None:
            body = {**body, name: value}
    return Line(custom_id, url, json.dumps(body, separators=(",", ":")).encode())


def row_of(custom_id: str, reply: Reply) -> Row:
    response = {"status_code": reply.status_code, "request_id": reply.request_id, "body": reply.body}
    return {"id": _new_id(), "custom_id": custom_id, "response": response, "error": None}


def unsent_row(custom_id: str, code: str, message: str) -> Row:
    """The row of a request that was not sent, such as one about a file that is gone."""
    return {"id": _new_id(), "custom_id": custom_id, "response": None, "error": {"code": code, "message": message}}


def is_answered(row: Row) -> bool:
    """Whether a row has an answer, and no failure."""
    response = row["response"]
    return bool(response is not None and response["status_code"] == OK)


def failure_of(row: Row) -> str:
    """Why a row has no answer; empty where it has one."""
    if row["error"] is not None:
        return str(row["error"]["message"])
    response = row["response"]
    return "" if is_answered(row) else Reply(response["status_code"], "", response["body"]).message or "no reason"


def tokens_of(row: Row) -> tuple[int, int]:
    """Tokens of the prompt and of the completion, as the answer of a row tells them."""
    body = row["response"]["body"] if is_answered(row) else {}
    usage = (body.get("usage") if isinstance(body, dict) else None) or {}
    prompt = usage.get("prompt_tokens", usage.get("input_tokens", 0))
    return prompt, usage.get("completion_tokens", usage.get("output_tokens", 0))


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"


def _refusal(error: ValidationError) -> InvalidRequest:
    found = error.errors(include_url=False)[0]
    field = ".".join(map(str, found["loc"]))
    if found["type"] == "json_invalid":
        return InvalidRequest(f"the line is not JSON: {found['msg'].removeprefix('Invalid JSON: ')}")
    if found["type"] == "missing":
        return InvalidRequest(field=field, limit="set")
    if found["type"] == "extra_forbidden":
        return InvalidRequest("is not a field of a request", field=field)
    text = repr(found["input"])
    shown = text if len(text) <= _VALUE_CHARACTERS else f"{text[:_VALUE_CHARACTERS]}…"
    reason = f"{found['msg'][:1].lower()}{found['msg'][1:]}"
    return InvalidRequest(f"is wrong: {reason}, got {shown}", field=field or None)
