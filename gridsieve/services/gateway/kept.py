"""POST /v1/gridsieve/kept: which tokens of each image and video pruning keeps, for the page that draws them.

The body is that of a chat request; its text is ignored. The encoder answers, whose embeddings are dropped.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gridsieve.client.client import GridsieveClient, Metadata
from gridsieve.client.credentials import Access
from gridsieve.client.encoding import Encoded, encode
from gridsieve.client.messages import pruning_message
from gridsieve.client.prompt import Audio, Image, Pruning, Text, Video
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.retention import BEFORE_TOWER, EVS
from gridsieve.common.contract.wire import completed, pruning_of
from gridsieve.common.security.tokens import AUTHORIZATION_KEY
from gridsieve.services.gateway.chat.content import names_of, turns_of
from gridsieve.services.gateway.chat.request import parse
from gridsieve.services.gateway.files import Files
from gridsieve.services.gateway.http.body import BodyLimit, read_body, unless_left
from gridsieve.services.gateway.http.errors import in_words
from gridsieve.services.gateway.http.request_guard import Call


class Kept:
    """client: of generation, whose settings tell what a body does not say. encoder: its address; None: unknown.
    access: for callers whose own token is not passed on."""

    def __init__(
        self, client: GridsieveClient, encoder: str | None, access: Access, files: Files, body_limit: BodyLimit
    ) -> None:
        self._client = client
        self._encoder = encoder
        self._access = access
        self._files = files
        self._body_limit = body_limit

    async def endpoint(self, request: Request) -> Response:
        call = Call.of(request)
        if not self._encoder:
            raise InvalidRequest("the kept tokens cannot be told: the gateway was started without --encoder")
        body = await read_body(request, self._body_limit, call.charge)
        chat = await asyncio.to_thread(parse, body)
        uploads = partial(self._files.url, owner=call.owner)
        turns = await asyncio.to_thread(turns_of, chat, uploads)
        media = [part for turn in turns for part in turn.message.parts if not isinstance(part, Text)]
        said = chat.pruning.parsed() if chat.pruning else Pruning()
        pruning = await self._completed(said, call.metadata)
        if said.method is None and pruning.threshold is None and pruning.method in BEFORE_TOWER:
            media = [_by_evs(part) for part in media]
        access = self._access.copy()
        if token := dict(call.metadata).get(AUTHORIZATION_KEY):
            access["token"] = token.removeprefix("Bearer ")
        with in_words(names_of(turns, {}).name_of):
            encoded = await unless_left(request, encode(self._encoder, media, pruning, chat.cache_salt or "", **access))
        return JSONResponse({"media": [_item(each) for each in encoded]})

    async def _completed(self, said: Pruning, metadata: Metadata) -> Pruning:
        if said.rate is not None and said.method is not None:
            return said
        model, *_ = await self._client.models(metadata=metadata)
        default = Pruning(model.pruning_rate, model.pruning_method, threshold=model.pruning_threshold)
        whole = pruning_of(completed(pruning_message(said), pruning_message(default)))
        return Pruning(whole.rate, whole.method, whole.seed, whole.threshold)


def _by_evs(part: Image | Video | Audio) -> Image | Video | Audio:
    """Embeddings have no pixels: where the service alone names a method of pixels, `evs` chooses, as in generation."""
    if isinstance(part, Audio) or not part.embeds:
        return part
    own = part.pruning or Pruning()
    return part if own.method or own.threshold is not None else replace(part, pruning=replace(own, method=EVS))


def _item(encoded: Encoded) -> dict[str, Any]:
    plan = encoded.plan
    return {
        "modality": plan.modality.value,
        "grid": {"t": plan.grid.t, "h": plan.grid.h, "w": plan.grid.w},
        "frame_times_s": list(plan.timestamps_s),
        "kept": encoded.kept.tolist(),
    }
