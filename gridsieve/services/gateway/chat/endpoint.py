"""POST /v1/chat/completions: a question to generation, answered whole or as server-sent events."""

from __future__ import annotations

from functools import partial

from gridsieve.services.gateway.chat.completion import CompletionWriter
from gridsieve.services.gateway.chat.content import conversation
from gridsieve.services.gateway.chat.names import FieldNames
from gridsieve.services.gateway.chat.options import options_of
from gridsieve.services.gateway.chat.request import StreamOptions, parse
from gridsieve.services.gateway.files import Uploads
from gridsieve.services.gateway.questions import Question


def translated(body: bytearray, uploads: Uploads) -> Question:
    """The question in a body. Raises InvalidRequest."""
    chat, names = parse(body), FieldNames()
    return Question(
        model=chat.model,
        is_streamed=bool(chat.stream),
        messages=conversation(chat, uploads, names),
        options=options_of(chat, names),
        writer=partial(CompletionWriter, chat.stream_options or StreamOptions()),
        logged={"user": chat.user, "metadata": chat.metadata},
        name_of=names.name_of,
    )
