"""POST /v1/embeddings, /v1/rerank and /v1/score: calls of generation's Embed and Score, one for each text or document,
which the engine computes together."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Message, ReadOptions, Text
from gridsieve.client.vectors import Embedding, Score, together
from gridsieve.common.contract.errors import InvalidRequest, path_of, steps_of
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.services.gateway.chat.content import content_of, names_of, part_of, turns_of
from gridsieve.services.gateway.chat.names import FieldNames, TurnNames
from gridsieve.services.gateway.chat.options import pruning_of
from gridsieve.services.gateway.chat.request import ChatRequest
from gridsieve.services.gateway.files import Files, Uploads
from gridsieve.services.gateway.http.body import BodyLimit, read_body, unless_left
from gridsieve.services.gateway.http.errors import in_words
from gridsieve.services.gateway.http.fields import parsed
from gridsieve.services.gateway.http.request_guard import Call
from gridsieve.services.gateway.models import Models
from gridsieve.services.gateway.vectors.request import (
    Content,
    EmbeddingsRequest,
    Parts,
    ReadRequest,
    RerankRequest,
    ScoreRequest,
)

B = TypeVar("B", bound=ReadRequest)
T = TypeVar("T", Embedding, Score)


@dataclass(frozen=True, slots=True)
class _Asked:
    """messages: of one call. name_of: the body's name of a field of the gRPC request."""

    messages: Sequence[Message]
    name_of: Callable[[str], str] = str


class Vectors:
    """body_limit: of media in a request."""

    def __init__(self, client: GridsieveClient, models: Models, files: Files, body_limit: BodyLimit) -> None:
        self._client = client
        self._models = models
        self._files = files
        self._body_limit = body_limit

    async def embeddings(self, request: Request) -> Response:
        body, asked = await self._read(request, EmbeddingsRequest, _conversations)
        metadata = Call.of(request).metadata

        async def embed(each: _Asked, options: ReadOptions) -> Embedding:
            with in_words(each.name_of):
                return await self._client.embedding(
                    each.messages, body.instruction, body.dimensions, options, metadata=metadata
                )

        told, found = await self._called(request, body, asked, embed)
        in_base64 = body.encoding_format == "base64"
        data = [
            {"object": "embedding", "index": index, "embedding": _base64(each) if in_base64 else each.values.tolist()}
            for index, each in enumerate(found)
        ]
        return JSONResponse({"object": "list", "data": data, **told})

    async def rerank(self, request: Request) -> Response:
        body, asked = await self._read(request, RerankRequest, _ranked)
        told, found = await self._scored(request, body, asked)
        best = sorted(range(len(found)), key=lambda index: -found[index].score)[: body.top_n]
        shown = [{"document": _shown(each)} if body.return_documents else {} for each in body.documents]
        results = [{"index": each, "relevance_score": found[each].score, **shown[each]} for each in best]
        return JSONResponse({"results": results, **told})

    async def score(self, request: Request) -> Response:
        body, asked = await self._read(request, ScoreRequest, _pairs)
        told, found = await self._scored(request, body, asked)
        data = [{"object": "score", "index": index, "score": each.score} for index, each in enumerate(found)]
        return JSONResponse({"object": "list", "data": data, **told})

    async def _read(
        self, request: Request, kind: type[B], translated: Callable[[B, Uploads], list[_Asked]]
    ) -> tuple[B, list[_Asked]]:
        """The body, and what it asks. Raises InvalidRequest."""
        call = Call.of(request)
        data = await read_body(request, self._body_limit, call.charge)
        body = await asyncio.to_thread(parsed, kind, data)
        return body, await asyncio.to_thread(translated, body, partial(self._files.url, owner=call.owner))

    async def _scored(
        self, request: Request, body: ReadRequest, asked: Sequence[_Asked]
    ) -> tuple[dict[str, Any], list[Score]]:
        metadata = Call.of(request).metadata

        async def score(each: _Asked, options: ReadOptions) -> Score:
            query, document = each.messages
            with in_words(each.name_of):
                return await self._client.scored(query, document, body.instruction, options, metadata=metadata)

        return await self._called(request, body, asked, score)

    async def _called(
        self,
        request: Request,
        body: ReadRequest,
        asked: Sequence[_Asked],
        ask: Callable[[_Asked, ReadOptions], Coroutine[Any, Any, T]],
    ) -> tuple[dict[str, Any], list[T]]:
        """The results, and what every answer tells beside them."""
        call = Call.of(request)
        model = await unless_left(request, self._models.find(body.model, call.metadata))
        same = ReadOptions(request_id=call.request_id, adapter=model.adapter, cache_salt=body.cache_salt)
        same.update(pruning_of(body.pruning))
        found = await unless_left(request, together(ask(each, same) for each in asked))
        tokens = sum(each.usage.prompt_tokens for each in found)
        full = sum(each.usage.prompt_tokens_full for each in found)
        add_request_stats(prompt_tokens_full=full, prompt_tokens=tokens)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return {"id": call.request_id, "model": model.name, "usage": usage}, found


def _conversations(body: EmbeddingsRequest, uploads: Uploads) -> list[_Asked]:
    if (body.input is None) is (body.messages is None):
        raise InvalidRequest("must be set, or messages, and not both", field="input")
    if body.input is not None:
        texts = [body.input] if isinstance(body.input, str) else body.input
        return [_Asked([Message("user", (Text(text),))]) for text in texts]
    media = {name: getattr(body, name) for name in ("pruning", "mm_processor_kwargs", "media_io_kwargs")}
    turns = turns_of(ChatRequest.model_construct(messages=list(body.conversation), **media), uploads)
    return [_Asked([turn.message for turn in turns], names_of(turns, {}).name_of)]


def _ranked(body: RerankRequest, uploads: Uploads) -> list[_Asked]:
    query = _turn(body.query, "query", body, uploads)
    named = ((each, f"documents[{number}]") for number, each in enumerate(body.documents))
    return [_asked(query, _turn(each, name, body, uploads)) for each, name in named]


def _pairs(body: ScoreRequest, uploads: Uploads) -> list[_Asked]:
    return [_asked(*(_turn(content, name, body, uploads) for name, content in pair)) for pair in body.pairs]


def _turn(content: Content, name: str, body: ReadRequest, uploads: Uploads) -> tuple[Message, TurnNames]:
    if isinstance(content, Parts):
        parts, names = content_of(
            content.content, f"{name}.content", lambda part, place: part_of(part, place, body, uploads)
        )
        return Message("user", parts), names
    return Message("user", (Text(content if isinstance(content, str) else content.text),)), TurnNames(name, name)


def _asked(query: tuple[Message, TurnNames], document: tuple[Message, TurnNames]) -> _Asked:
    names = FieldNames([query[1], document[1]], "query")

    def name_of(field: str) -> str:
        match steps_of(field):
            case "query" | "document" as which, *rest:
                parts = ("parts", *rest) if rest else ()
                return names.name_of(path_of("prompt", "messages", int(which == "document"), *parts))
        return names.name_of(field)

    return _Asked([query[0], document[0]], name_of)


def _base64(embedding: Embedding) -> str:
    """float32, little-endian."""
    return base64.b64encode(embedding.values.astype("<f4").tobytes()).decode()


def _shown(document: Content) -> dict[str, Any]:
    return {"text": document} if isinstance(document, str) else document.model_dump(exclude_none=True)
