"""Errors as OpenAI's clients expect them: an HTTP status, and a body that names the field.

    {"error": {"message": "temperature must be …", "type": "invalid_request_error", "param": "temperature",
               "code": "INVALID_REQUEST"}}

`code` is the machine-readable reason of `framesieve.common.contract.errors`.
"""

from __future__ import annotations

import math
import re
from typing import Any

from starlette.exceptions import HTTPException

from framesieve.client.messages import IN_PYTHON
from framesieve.common.contract.errors import (
    DeadlinePassed,
    FramesieveError,
    InvalidRequest,
    MediaForbidden,
    Overloaded,
    Unauthenticated,
    Unavailable,
)

CLIENT_CLOSED_REQUEST = 499
"""The status of a request whose client left, in logs and metrics only. Source: nginx."""

_INTERNAL = (500, "internal_error")

_LARGER_FILES = "larger files as an https URL, or upload them to /v1/files first"

# Names of the gRPC contract, in the words of this one, where the caller has one name for each.
_WORDS = (
    (re.compile(r"prompt\.messages\[(\d+)\]\.parts\[(\d+)\]\.text"), r"messages[\1].content[\2]"),
    (re.compile(r"prompt\.messages\[(\d+)\]\.parts"), r"messages[\1].content"),
    (re.compile(r"(messages\[\d+\]\.tool_calls\[\d+\])\.(name|arguments)"), r"\1.function.\2"),
    (re.compile(r"prompt\.messages"), "messages"),
    (re.compile(r"prompt\.tools(\[\d+\])\."), r"tools\1.function."),
    (re.compile(r"prompt\.tools"), "tools"),
    (re.compile(r"prompt\.template_options"), "chat_template_kwargs"),
    (re.compile(r"tool_choice\.mode"), "tool_choice"),
)
# Messages that are about a field begin with it; the others begin with an article or the like.
_FIELD = re.compile(r"(?!(?:a|the|there|this) )[a-z_]+(?:\[\d+\])*(?:\.[a-z_]+(?:\[\d+\])*)*")


class NotFound(InvalidRequest):
    """A model, file or path that does not exist."""

    reason = "NOT_FOUND"


class WrongMethod(InvalidRequest):
    """A path that exists, with another method."""

    reason = "METHOD_NOT_ALLOWED"


class TooLarge(InvalidRequest):
    """A body above its limit."""

    reason = "TOO_LARGE"


_STATUSES: tuple[tuple[type[FramesieveError], int, str], ...] = (
    (NotFound, 404, "not_found_error"),
    (WrongMethod, 405, "invalid_request_error"),
    (TooLarge, 413, "invalid_request_error"),
    (InvalidRequest, 400, "invalid_request_error"),
    (Unauthenticated, 401, "authentication_error"),
    (MediaForbidden, 403, "permission_error"),
    (Overloaded, 429, "rate_limit_error"),
    (Unavailable, 503, "service_unavailable_error"),
    (DeadlinePassed, 504, "timeout_error"),
)


def status_of(error: FramesieveError) -> int:
    """The HTTP status."""
    return next((status for kind, status, _ in _STATUSES if isinstance(error, kind)), _INTERNAL[0])


def body_of(error: FramesieveError) -> dict[str, Any]:
    """The JSON body."""
    message = in_our_words(str(error))
    field = _FIELD.match(message)
    named = field[0] if field and isinstance(error, InvalidRequest) and message[field.end() :][:1] == " " else None
    kind = next((name for kind, _, name in _STATUSES if isinstance(error, kind)), _INTERNAL[1])
    told: dict[str, Any] = {"message": message, "type": kind, "param": named, "code": error.reason}
    if isinstance(error, Unavailable):
        told["stage"] = error.stage
    return {"error": told}


def headers_of(error: FramesieveError) -> dict[str, str]:
    """Retry-After in whole seconds where waiting helps, and the scheme of authentication."""
    if isinstance(error, Overloaded):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, Unavailable):
        return {"Retry-After": "1"}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthenticated) else {}


def of_router(error: HTTPException, method: str, path: str) -> InvalidRequest:
    """The error for a path or method that has no endpoint."""
    if error.status_code == 405:
        return WrongMethod(f"{path} has no method {method}, only {(error.headers or {}).get('Allow', '')}")
    instead = ", only POST /v1/chat/completions" if path == "/v1/completions" else ""
    return NotFound(f"there is no {method} {path}{instead}")


def in_our_words(message: str) -> str:
    """The text of another service's error, with the fields of the HTTP request."""
    message = message.replace(IN_PYTHON, _LARGER_FILES)
    for pattern, word in _WORDS:
        message = pattern.sub(word, message)
    return message
