"""POST /v1/responses: a question to generation, answered whole or as server-sent events. Nothing is kept."""

from __future__ import annotations

from functools import partial

from framesieve.services.gateway.files import Uploads
from framesieve.services.gateway.questions import Question
from framesieve.services.gateway.responses.options import options_of
from framesieve.services.gateway.responses.request import parse
from framesieve.services.gateway.responses.response import ResponseWriter, repeated
from framesieve.services.gateway.responses.turns import naming_of, turns_of


def translated(body: bytearray, uploads: Uploads) -> Question:
    """The question in a body. Raises InvalidRequest."""
    request = parse(body)
    turns = turns_of(request, uploads)
    return Question(
        model=request.model,
        is_streamed=bool(request.stream),
        messages=[turn.message for turn in turns],
        options=options_of(request),
        writer=partial(ResponseWriter, repeated(request)),
        logged={"user": request.user, "metadata": request.metadata},
        name_of=naming_of(turns),
    )
