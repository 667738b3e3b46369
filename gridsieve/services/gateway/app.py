"""The routes of the gateway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, Router, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from gridsieve.common.security.tokens import AUTHORIZATION_KEY, Tokens
from gridsieve.common.telemetry.callers import FAMILIES
from gridsieve.services.gateway import openapi
from gridsieve.services.gateway.batches.endpoint import Batches
from gridsieve.services.gateway.chat import endpoint as chat
from gridsieve.services.gateway.files import Files
from gridsieve.services.gateway.http.request_guard import FILMS
from gridsieve.services.gateway.kept import Kept
from gridsieve.services.gateway.models import Models
from gridsieve.services.gateway.moments import Moments
from gridsieve.services.gateway.page import PAGE_ROUTES
from gridsieve.services.gateway.questions import Questions
from gridsieve.services.gateway.realtime.endpoint import Realtime
from gridsieve.services.gateway.realtime.watch import Watch
from gridsieve.services.gateway.responses.endpoint import Responses
from gridsieve.services.gateway.vectors.endpoint import Vectors


def routes(
    questions: Questions,
    models: Models,
    files: Files,
    kept: Kept,
    realtime: Realtime,
    watch: Watch,
    vectors: Vectors,
    batches: Batches,
    moments: Moments,
    is_well: Callable[[], Awaitable[bool]],
    tokens: Tokens | None,
) -> Router:
    """The application without its guard. tokens: for those who show one, /metrics has what callers used."""

    async def health(request: Request) -> Response:
        well = await is_well()
        return JSONResponse({"status": "serving" if well else "not serving"}, 200 if well else 503)

    without_callers = CollectorRegistry()
    without_callers.register(_WithoutCallers())

    async def metrics(request: Request) -> Response:
        is_known = tokens is None or tokens.name_of(request.headers.get(AUTHORIZATION_KEY, "")) is not None
        encode, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(REGISTRY if is_known else without_callers), headers={"content-type": kind})

    about = {
        "version": version("gridsieve"),
        "max_inline_bytes": questions.max_inline_bytes,
        "uploads": files.limits and asdict(files.limits),
        "moments": moments.are_served,
    }

    async def told(request: Request) -> Response:
        return JSONResponse(about)

    answers = Responses(questions)
    found: list[BaseRoute] = [
        Route("/v1/chat/completions", partial(questions.answer, translated=chat.translated), methods=["POST"]),
        Route("/v1/responses", answers.endpoint, methods=["POST"]),
        Route("/v1/responses/{response_id}", answers.response_endpoint, methods=["GET", "DELETE"]),
        WebSocketRoute("/v1/realtime", realtime.endpoint),
        Route("/v1/embeddings", vectors.embeddings, methods=["POST"]),
        Route("/v1/rerank", vectors.rerank, methods=["POST"]),
        Route("/v2/rerank", vectors.rerank, methods=["POST"]),
        Route("/v1/score", vectors.score, methods=["POST"]),
        Route("/v1/models", models.endpoint),
        Route("/v1/models/{model:path}", models.endpoint),
        Route("/v1/files", files.endpoint, methods=["GET", "POST"]),
        Route("/v1/files/{file_id}", files.file_endpoint, methods=["GET", "DELETE"]),
        Route("/v1/files/{file_id}/content", files.content_endpoint),
        Route("/v1/batches", batches.endpoint, methods=["GET", "POST"]),
        Route("/v1/batches/{batch_id}", batches.batch_endpoint),
        Route("/v1/batches/{batch_id}/cancel", batches.cancel_endpoint, methods=["POST"]),
        Route("/v1/gridsieve/kept", kept.endpoint, methods=["POST"]),
        Route("/v1/gridsieve/live", watch.endpoint, methods=["POST"]),
        Route("/v1/gridsieve/moments", moments.endpoint, methods=["POST"]),
        Route(f"{FILMS}{{ticket}}", moments.film),
        Route("/health", health),
        Route("/version", told),
        Route("/metrics", metrics),
    ]
    found.append(Route("/openapi.json", openapi.endpoint_of(found)))
    return Router([*found, *PAGE_ROUTES], default=_nowhere)


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    """Of WebSockets, too, which starlette's own answers with an empty 403."""
    raise HTTPException(404)


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Lets pages of other origins call the application, and read its errors. A preflight has no token, and needs none.

    app: with its guard. origins: * for all.
    """
    if not origins:
        return app
    return CORSMiddleware(app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])


class _WithoutCallers(Collector):
    def collect(self) -> Iterator[Metric]:
        return (family for family in REGISTRY.collect() if family.name not in FAMILIES)
