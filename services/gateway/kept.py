"""POST /v1/framesieve/kept: which patches of a media item pruning keeps, for the page that draws them.

The body is that of a chat request whose message is one media part; the encoder answers. Its embeddings come along and
are dropped.
"""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from common.contract.errors import InvalidRequest
from common.contract.retention import Pruning
from framesieve.client.credentials import Access
from framesieve.client.encoding import Encoded, encode
from framesieve.client.prompt import Text
from services.gateway.chat.content import conversation
from services.gateway.chat.request import parse
from services.gateway.files import Files
from services.gateway.http.body import read_body, unless_left
from services.gateway.http.request_guard import Call


class Kept:
    """encoder: its address; None: unknown. access: as for the client."""

    def __init__(self, encoder: str | None, access: Access, files: Files, max_body_bytes: int) -> None:
        self._encoder = encoder
        self._access = access
        self._files = files
        self._max_body_bytes = max_body_bytes

    async def endpoint(self, request: Request) -> Response:
        call = Call.of(request)
        if self._encoder is None:
            raise InvalidRequest("what was kept is not told: the gateway has no --encoder")
        body = await read_body(request, self._max_body_bytes, call.charge)
        chat = await asyncio.to_thread(parse, body)
        turns = conversation(chat, lambda file_id: self._files.server_path(file_id, call.owner))
        parts = [part for turn in turns for part in turn.parts if not isinstance(part, Text)]
        pruning = chat.pruning.parsed() if chat.pruning else Pruning()
        found = await unless_left(request, encode(self._encoder, parts, pruning, **self._access))
        return JSONResponse({"media": [_item(each) for each in found]})


def _item(encoded: Encoded) -> dict[str, Any]:
    plan = encoded.plan
    return {
        "modality": plan.modality.value,
        "grid": {"t": plan.grid.t, "h": plan.grid.h, "w": plan.grid.w},
        "frame_times_s": list(plan.timestamps_s),
        "kept": encoded.kept.tolist(),
    }
