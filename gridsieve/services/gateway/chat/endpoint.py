"""POST /v1/chat/completions: a question to generation, answered whole or as server-sent events."""

from __future__ import annotations

from functools import partial

from gridsieve.services.gateway.chat.completion import CompletionWriter
from gridsieve.services.gateway.chat.content import names_of, turns_of
from gridsieve.services.gateway.chat.options import check_captions, options_of
from gridsieve.services.gateway.chat.request import MomentsFormat, StreamOptions, parse
from gridsieve.services.gateway.files import Uploads
from gridsieve.services.gateway.questions import Question


def translated(body: bytearray, uploads: Uploads) -> Question:
    """The question in a body. Raises InvalidRequest."""
    chat = parse(body)
    turns, (options, names) = turns_of(chat, uploads), options_of(chat)
    messages, form = [turn.message for turn in turns], chat.response_format
    moments = form if isinstance(form, MomentsFormat) else None
    if moments:
        check_captions(moments, messages, "response_format")
    return Question(
        model=chat.model,
        is_streamed=bool(chat.stream),
        messages=messages,
        options=options,
        writer=partial(CompletionWriter, chat.stream_options or StreamOptions(), moments=moments),
        logged={"user": chat.user, "metadata": chat.metadata},
        name_of=names_of(turns, names).name_of,
    )
