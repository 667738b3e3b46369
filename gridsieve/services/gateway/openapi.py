"""GET /openapi.json: the routes in OpenAPI 3.1. The schemas of bodies are those that parse them; answers are described.

It says what cannot be read from a route, and which errors it can end with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, TypeAlias

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute

from gridsieve.services.gateway.batches.request import BatchListing, BatchRequest
from gridsieve.services.gateway.chat.request import ChatRequest
from gridsieve.services.gateway.files import Listing
from gridsieve.services.gateway.http.errors import STATUS_TEXTS
from gridsieve.services.gateway.http.request_guard import FILMS, route_of
from gridsieve.services.gateway.moments import MomentsRequest
from gridsieve.services.gateway.realtime.request import SessionFields
from gridsieve.services.gateway.responses.request import ResponsesRequest
from gridsieve.services.gateway.vectors.request import EmbeddingsRequest, RerankRequest, ScoreRequest

Schema: TypeAlias = dict[str, Any]

_REF = "#/components/{kind}/{name}"
_JSON, _EVENTS, _FORM, _TEXT = "application/json", "text/event-stream", "multipart/form-data", "text/plain"
_BYTES = "application/octet-stream"
_UPLOAD: Schema = {
    "type": "object",
    "required": ["file"],
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "purpose": {"type": "string"},
    },
    "additionalProperties": False,
}
_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "description": "names field, value and limit"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "the field"},
                "code": {"type": "string"},
                "stage": {"type": "string", "description": "the service that cannot be reached"},
            },
        }
    },
}


@dataclass(frozen=True, slots=True)
class _Operation:
    """text: what it does. answer: what comes with its status. body: a model, or the schema of a form."""

    text: str
    answer: str
    body: type[BaseModel] | Schema | None = None
    query: type[BaseModel] | None = None
    kinds: tuple[str, ...] = (_JSON,)
    status: int = 200


_RERANK = _Operation(
    "The documents that answer a query best, as Cohere's and vLLM's rerank.",
    "Cohere's `results`: `index` and `relevance_score`, the best first.",
    RerankRequest,
)
_OPERATIONS = {
    ("POST", "/v1/chat/completions"): _Operation(
        "Answers a question about images and videos, as OpenAI's chat completions do.",
        "OpenAI's chat completion, with `usage.gridsieve`; with `stream`, its chunks.",
        ChatRequest,
        kinds=(_JSON, _EVENTS),
    ),
    ("POST", "/v1/responses"): _Operation(
        "Answers a question about images and videos, as OpenAI's Responses do.",
        "OpenAI's response, with `usage.gridsieve`; with `stream`, its events.",
        ResponsesRequest,
        kinds=(_JSON, _EVENTS),
    ),
    ("GET", "/v1/responses/{response_id}"): _Operation("A response that is stored.", "OpenAI's response."),
    ("DELETE", "/v1/responses/{response_id}"): _Operation(
        "Deletes a response, and with it the conversations that continue it.", "`id`, `object`, `deleted`."
    ),
    ("GET", "/v1/realtime"): _Operation(
        "A WebSocket: live video in OpenAI's Realtime events.", "The connection is a WebSocket.", kinds=(), status=101
    ),
    ("POST", "/v1/embeddings"): _Operation(
        "The vectors of texts, or of a conversation with images and videos, as OpenAI's and vLLM's embeddings.",
        "OpenAI's list of embeddings.",
        EmbeddingsRequest,
    ),
    ("POST", "/v1/rerank"): _RERANK,
    ("POST", "/v2/rerank"): _RERANK,
    ("POST", "/v1/score"): _Operation(
        "How well documents answer queries, as vLLM's scores.", "vLLM's list of scores.", ScoreRequest
    ),
    ("GET", "/v1/models"): _Operation(
        "The names that a request may give as `model`.",
        "OpenAI's list of models, with `max_model_len`, `task` and pruning.",
    ),
    ("GET", "/v1/models/{model}"): _Operation("One of these names.", "OpenAI's model, as in the list."),
    ("GET", "/v1/files"): _Operation("The caller's uploaded files.", "OpenAI's list of files.", query=Listing),
    ("POST", "/v1/files"): _Operation("Uploads a file, for questions by its id.", "OpenAI's file.", _UPLOAD),
    ("GET", "/v1/files/{file_id}"): _Operation("An uploaded file.", "OpenAI's file, without its bytes."),
    ("DELETE", "/v1/files/{file_id}"): _Operation("Deletes a file.", "`id`, `object`, `deleted`."),
    ("GET", "/v1/files/{file_id}/content"): _Operation("The bytes of a file.", "The file.", kinds=(_BYTES,)),
    ("GET", "/v1/batches"): _Operation("The caller's batches.", "OpenAI's list of batches.", query=BatchListing),
    ("POST", "/v1/batches"): _Operation(
        "Answers the requests of a file, which yield to others.", "OpenAI's batch.", BatchRequest
    ),
    ("GET", "/v1/batches/{batch_id}"): _Operation("A batch.", "OpenAI's batch."),
    ("POST", "/v1/batches/{batch_id}/cancel"): _Operation("Ends a batch, which keeps its rows.", "OpenAI's batch."),
    ("POST", "/v1/gridsieve/kept"): _Operation(
        "The tokens that pruning keeps of the media of a question.",
        "For each medium: `modality`, `grid`, `frame_times_s`, `kept`.",
        ChatRequest,
    ),
    ("POST", "/v1/gridsieve/live"): _Operation(
        "Watches a camera, and asks about it, until the client leaves.",
        "The events of Realtime, each with its `type` as its name.",
        SessionFields,
        kinds=(_EVENTS,),
    ),
    ("POST", "/v1/gridsieve/moments"): _Operation(
        "Finds moments of the folder of films (--moments) that a text describes.",
        "`moments`: `file`, `start_s`, `end_s`, `score`, `picture` (a data: URL) and `film` (a path), the best first; "
        "`content`: the same as parts of a chat request, to stand before a question.",
        MomentsRequest,
    ),
    ("GET", f"{FILMS}{{ticket}}"): _Operation(
        "A film, at the path that came with a moment less than an hour ago. It takes `Range`.",
        "The film.",
        kinds=("video/*",),
    ),
    ("GET", "/health"): _Operation("Whether a question can be answered.", "`status`. With 503: not now."),
    ("GET", "/metrics"): _Operation("Prometheus' metrics.", "Prometheus' text format.", kinds=(_TEXT,)),
    ("GET", "/version"): _Operation("The release, and the limits of media in a request.", "`version` and the limits."),
    ("GET", "/openapi.json"): _Operation("This document.", "This document."),
}


def endpoint_of(routes: Sequence[BaseRoute]) -> Callable[[Request], Awaitable[Response]]:
    """Serves the document of these routes, to which more may be added until it is asked for."""
    made: Schema = {}

    async def endpoint(request: Request) -> Response:
        if not made:
            made.update(await asyncio.to_thread(document, routes))
        return JSONResponse(made)

    return endpoint


def document(routes: Sequence[BaseRoute]) -> Schema:
    """Raises KeyError for a route that has no operation here."""
    bodies = {each.body for each in _OPERATIONS.values() if isinstance(each.body, type)}
    models: list[tuple[type[BaseModel], JsonSchemaMode]]
    models = [(model, "validation") for model in sorted(bodies, key=lambda model: model.__name__)]
    _, schemas = models_json_schema(models, ref_template=_REF.format(kind="schemas", name="{model}"))
    paths: dict[str, Schema] = {}
    for route in routes:
        assert isinstance(route, Route | WebSocketRoute)
        path = route.path_format
        names = [
            {"name": each, "in": "path", "required": True, "schema": {"type": "string"}}
            for each in route.param_convertors
        ]
        for method in sorted(getattr(route, "methods", None) or {"GET"}):
            if method != "HEAD":
                paths.setdefault(path, {})[method.lower()] = _described(path, _OPERATIONS[method, path], names)
    error = {_JSON: {"schema": _ref("schemas", "Error")}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Gridsieve", "version": version("gridsieve")},
        "security": [{"token": []}, {}],
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "responses": {
                str(status): {"description": text, "content": error} for status, text in STATUS_TEXTS.items()
            },
            "securitySchemes": {
                "token": {
                    "type": "http",
                    "scheme": "bearer",
                    "description": "Where the gateway or generation checks tokens (--auth-tokens-file).",
                }
            },
        },
    }


def _described(path: str, operation: _Operation, parameters: list[Schema]) -> Schema:
    of_any = {kind: {"schema": {"type": "object"} if kind == _JSON else {"type": "string"}} for kind in operation.kinds}
    answer = {"description": operation.answer} | ({"content": of_any} if of_any else {})
    found: Schema = {"summary": operation.text, "responses": {str(operation.status): answer}}
    if operation.query:
        fields = operation.query.model_json_schema()["properties"]
        parameters = [*parameters, *({"name": name, "in": "query", "schema": each} for name, each in fields.items())]
    if parameters:
        found["parameters"] = parameters
    if isinstance(operation.body, dict):
        found["requestBody"] = {"required": True, "content": {_FORM: {"schema": operation.body}}}
    elif operation.body:
        schema = _ref("schemas", operation.body.__name__)
        found["requestBody"] = {"required": True, "content": {_JSON: {"schema": schema}}}
    if route_of(path) is None:  # neither a token nor any of these errors, see the guard
        return found | {"security": []}
    for status in STATUS_TEXTS:
        if operation.body or status not in (413, 415):
            found["responses"][str(status)] = _ref("responses", str(status))
    return found


def _ref(kind: str, name: str) -> Schema:
    return {"$ref": _REF.format(kind=kind, name=name)}
