"""POST /v1/gridsieve/moments: the moments of the folder of --moments that a text describes, and their films.

A film is read in parts (Range), at an address that is told with its moment. The folder's index was made before, by
`gridsieve index`; nothing is decoded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import structlog
from pydantic import Field
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response

from gridsieve.client.client import GridsieveClient
from gridsieve.client.prompt import Part, Text, Video
from gridsieve.common.contract.errors import InvalidRequest, Unavailable
from gridsieve.common.telemetry.logs import add_request_stats
from gridsieve.search.films import FilmMoment
from gridsieve.search.folder_search import FolderSearch
from gridsieve.search.parts import data_url
from gridsieve.services.gateway.http.body import BodyLimit, read_body, unless_left
from gridsieve.services.gateway.http.errors import NotFound, in_words
from gridsieve.services.gateway.http.fields import Strict, Whole, parsed
from gridsieve.services.gateway.http.request_guard import FILMS, Call
from gridsieve.services.gateway.http.tickets import Ticket, Tickets

_BODY = BodyLimit(2**16, "a search is a short text", "describe what is to be seen in fewer words")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "private",  # a shared cache would answer after the ticket has expired
}


log = structlog.get_logger()


class MomentsRequest(Strict):
    """text: what is to be seen. limit: how many moments at most, the best first."""

    text: Annotated[str, Field(min_length=1)]
    limit: Annotated[Whole, Field(ge=1, le=100)] = 12


class Moments:
    """folder: None where the gateway serves none. embedder: of the model that made its index. store: as of
    `FolderSearch`. tickets: the guard's."""

    def __init__(self, folder: Path | None, embedder: GridsieveClient, store: str | None, tickets: Tickets) -> None:
        self._folder, self._embedder, self._store, self._tickets = folder, embedder, store, tickets

    @property
    def are_served(self) -> bool:
        return self._folder is not None

    async def endpoint(self, request: Request) -> Response:
        call, folder = Call.of(request), self._known()
        body = await read_body(request, _BODY, call.charge)
        asked = parsed(MomentsRequest, body)
        try:
            return JSONResponse(await unless_left(request, self._found(folder, asked, call)))
        except Unavailable as error:
            if error.stage == "generation":
                raise Unavailable(f"the embedder of --moments is away: {error}", "embedder") from error
            if error.stage == "store":  # its words may name hosts and users
                log.error("the index of --moments cannot be read", error=str(error))
                text = f"the index of --moments cannot be read, request id {call.request_id}"
                raise Unavailable(text, "store") from error
            raise

    async def film(self, request: Request) -> Response:
        """GET: a film, or the part of it that Range names."""
        folder = self._known().resolve()
        ticket = self._tickets.read(request.path_params["ticket"])
        path = (folder / ticket.subject).resolve()
        if not path.is_relative_to(folder) or not path.is_file():
            raise NotFound("is not in the folder any more", field=ticket.subject)
        return FileResponse(path, headers=_HEADERS)

    async def _found(self, folder: Path, asked: MomentsRequest, call: Call) -> dict[str, Any]:
        opened = FolderSearch(folder, self._embedder, store=self._store, on_server=True, metadata=call.metadata)
        async with opened as index:
            with in_words(lambda _: "text"):
                sought = await index.embedded(asked.text)
            usage = sought.usage
            add_request_stats(prompt_tokens_full=usage.prompt_tokens_full, prompt_tokens=usage.prompt_tokens)
            moments = await index.nearest(sought, asked.limit)
            pictures = await index.pictures(moments)
            in_order = sorted(moments, key=lambda each: (each.path, each.start_s))
            return {
                "moments": [
                    self._told(each, picture, call.client) for each, picture in zip(moments, pictures, strict=True)
                ],
                "content": _content(index.parts(in_order)),
            }

    def _told(self, moment: FilmMoment, picture: bytes, client: str) -> dict[str, Any]:
        told = asdict(moment)
        path = told.pop("path")
        film = f"{FILMS}{self._tickets.written(Ticket(client, path))}"
        return {"file": path, **told, "picture": data_url(picture), "film": film}

    def _known(self) -> Path:
        if self._folder is None:
            raise InvalidRequest("there are no films to search: the gateway was started without --moments")
        return self._folder


def _content(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Parts of a chat request: texts, and films by the paths that preprocessing opens."""
    told: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case Text(text):
                told.append({"type": "text", "text": text})
            case Video(server_path=str(path), start_s=start_s, end_s=end_s, max_frames=max_frames):
                which = {"video_start": start_s, "video_end": end_s, "max_frames": max_frames}
                url = f"file://{quote(path)}"
                told.append({"type": "video_url", "video_url": {"url": url}, "mm_processor_kwargs": which})
    return told
