"""Errors as OpenAI's clients expect them: an HTTP status, and a body that names the field.

    {"error": {"message": "temperature must be …", "type": "invalid_request_error", "param": "temperature",
               "code": "INVALID_REQUEST"}}

`code` is the machine-readable reason of `gridsieve.common.contract.errors`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import Scope

from gridsieve.client.messages import IN_PYTHON
from gridsieve.common.contract.errors import (
    DeadlinePassed,
    GridsieveError,
    InvalidRequest,
    MediaForbidden,
    Overloaded,
    Unauthenticated,
    Unavailable,
)

CLIENT_CLOSED_REQUEST = 499
"""The status of a request whose client left, in logs and metrics only. Source: nginx."""

ENCODINGS = ("gzip", "deflate")
"""In which bodies may be compressed. Source: RFC 9110 section 8.4.1."""

_INTERNAL = (500, "internal_error")

_INSTEAD = {"/v1/completions": ", only POST /v1/chat/completions", "/v1/realtime": ", only a WebSocket"}

LARGER_UPLOADS = "give larger files as an https URL or a file: path below --media-root"
LARGER_BODIES = "upload larger files to /v1/files, or give an https URL or a file: path below --media-root"
_REMEDIES = {IN_PYTHON: LARGER_BODIES}


class NotFound(InvalidRequest):
    """A model, file, response or path that does not exist."""

    reason = "NOT_FOUND"


class PreviousResponseNotFound(InvalidRequest):
    """A response that is to be continued and is not stored. Clients know OpenAI's code, and send the items instead."""

    reason = "previous_response_not_found"


class WrongMethod(InvalidRequest):
    """A path that exists, with another method."""

    reason = "METHOD_NOT_ALLOWED"


class TooLarge(InvalidRequest):
    """A body above its limit."""

    reason = "TOO_LARGE"


class UnsupportedEncoding(InvalidRequest):
    """A body that is compressed in another way."""

    reason = "UNSUPPORTED_ENCODING"


class ForbiddenOrigin(InvalidRequest):
    """A page of another origin, which may not use the gateway, or a name that the gateway does not have."""

    reason = "FORBIDDEN_ORIGIN"


_STATUSES: tuple[tuple[type[GridsieveError], int, str], ...] = (
    (NotFound, 404, "not_found_error"),
    (WrongMethod, 405, "invalid_request_error"),
    (ForbiddenOrigin, 403, "permission_error"),
    (TooLarge, 413, "invalid_request_error"),
    (UnsupportedEncoding, 415, "invalid_request_error"),
    (InvalidRequest, 400, "invalid_request_error"),
    (Unauthenticated, 401, "authentication_error"),
    (MediaForbidden, 403, "permission_error"),
    (Overloaded, 429, "rate_limit_error"),
    (Unavailable, 503, "service_unavailable_error"),
    (DeadlinePassed, 504, "timeout_error"),
)

STATUS_TEXTS = {
    status: " ".join(kind.__doc__ or "" for kind, each, _ in _STATUSES if each == status)
    for status in sorted({status for _, status, _ in _STATUSES})
} | {_INTERNAL[0]: "A bug, or a service that broke the contract. The error has the id of the request."}
"""What each status of an error means."""


def status_of(error: GridsieveError) -> int:
    """The HTTP status."""
    return next((status for kind, status, _ in _STATUSES if isinstance(error, kind)), _INTERNAL[0])


def body_of(error: GridsieveError) -> dict[str, Any]:
    """The JSON body."""
    kind = next((name for kind, _, name in _STATUSES if isinstance(error, kind)), _INTERNAL[1])
    told: dict[str, Any] = {"message": str(error), "type": kind, "param": None, "code": error.reason}
    if error.field is not None:
        told["param"], *_ = error.field.split(" ")
    if isinstance(error, Unavailable):
        told["stage"] = error.stage
    return {"error": told}


def headers_of(error: GridsieveError) -> dict[str, str]:
    """Retry-After in whole seconds where waiting helps, the scheme of authentication, and encodings of bodies."""
    if isinstance(error, Overloaded):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, Unavailable):
        return {"Retry-After": "1"}
    if isinstance(error, UnsupportedEncoding):
        return {"Accept-Encoding": ", ".join(ENCODINGS)}
    return {"WWW-Authenticate": "Bearer"} if isinstance(error, Unauthenticated) else {}


def of_router(error: HTTPException, scope: Scope) -> InvalidRequest:
    """The error for a path or method that has no endpoint."""
    path, method = scope["path"], scope.get("method", "WebSocket")
    if error.status_code == 405:
        return WrongMethod(f"{path} has no method {method}, only {(error.headers or {}).get('Allow', '')}")
    return NotFound(f"there is no {method} {path}{_INSTEAD.get(path, '')}")


@contextmanager
def in_words(name_of: Callable[[str], str]) -> Iterator[None]:
    """Puts the names of the HTTP request into errors of generation.

    name_of: of a field of the gRPC request; words may follow: "messages[0].content[1].file.file_id at frame 3".
    """
    try:
        yield
    except GridsieveError as error:
        error.rename(name_of, _REMEDIES)
        raise
