"""POST /v1/chat/completions: a question to generation, answered whole or as server-sent events."""

from __future__ import annotations

from functools import partial

from gridsieve.client.prompt import Video
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.gateway.chat.completion import CompletionWriter
from gridsieve.services.gateway.chat.content import names_of, turns_of
from gridsieve.services.gateway.chat.options import options_of
from gridsieve.services.gateway.chat.request import MomentsFormat, StreamOptions, parse
from gridsieve.services.gateway.files import Uploads
from gridsieve.services.gateway.questions import Question


def translated(body: bytearray, uploads: Uploads) -> Question:
    """The question in a body. Raises InvalidRequest."""
    chat = parse(body)
    turns, (options, names) = turns_of(chat, uploads), options_of(chat)
    form = chat.response_format
    moments = form if isinstance(form, MomentsFormat) else None
    if moments and moments.captions:
        videos = sum(isinstance(part, Video) for turn in turns for part in turn.message.parts)
        if videos != 1:
            raise InvalidRequest(field="response_format.captions", limit="of one video", value=f"{videos} videos")
    return Question(
        model=chat.model,
        is_streamed=bool(chat.stream),
        messages=[turn.message for turn in turns],
        options=options,
        writer=partial(CompletionWriter, chat.stream_options or StreamOptions(), moments=moments),
        logged={"user": chat.user, "metadata": chat.metadata},
        name_of=names_of(turns, names).name_of,
    )
