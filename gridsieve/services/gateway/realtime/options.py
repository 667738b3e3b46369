"""What a client's events ask for, in gRPC's messages, and where it wrote the fields that errors name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import Message, Options, Text
from gridsieve.common.contract.errors import InvalidRequest, path_of, steps_of, within
from gridsieve.services.gateway.chat.options import pruning_of
from gridsieve.services.gateway.realtime.request import LiveFields, ResponseFields, SessionFields
from gridsieve.v1 import generation_pb2

_RESPONSE_NAMES = {
    "max_new_tokens": "max_output_tokens",
    "json_schema": "gridsieve.structured_outputs",
    "json_object": "gridsieve.structured_outputs",
}


def open_message(session: SessionFields, request_id: str, adapter: str | None) -> generation_pb2.LiveOpen:
    """Raises InvalidRequest in gRPC's names, see `name_of`."""
    own = session.gridsieve or LiveFields()
    messages = [Message("system", (Text(session.instructions),))] if session.instructions else []
    request = generate_request(messages, pruning_of(own.pruning))
    opened = generation_pb2.LiveOpen(
        messages=request.prompt.messages,
        pruning=request.pruning if own.pruning else None,
        fps=own.fps,
        max_pixels=own.max_pixels,
        window_tokens=own.window_tokens,
        window_s=own.window_s,
        answer_tokens=own.answer_tokens,
        request_id=request_id,
        adapter=adapter,
        source=own.source,
        source_name=own.source_name,
        reopens=own.reopens,
        snapshots=f"SNAPSHOTS_{own.snapshots.upper()}" if own.snapshots else None,
    )
    for index, trigger in enumerate(own.triggers or ()):
        name = f"open.triggers[{index}]"
        if not trigger.response.instructions:
            raise InvalidRequest(field=f"{name}.response.instructions", limit="set")
        with within(name):
            ask = ask_message(trigger_id(index), [trigger.response.instructions], trigger.response, session)
        opened.triggers.add(ask=ask, every_s=trigger.every_s, on_change=trigger.on_change)
    return opened


def trigger_id(index: int) -> str:
    """The id with which generation answers a trigger."""
    return f"trigger_{index}"


def ask_message(
    ask_id: str, texts: Sequence[str], response: ResponseFields, session: SessionFields
) -> generation_pb2.LiveAsk:
    """texts: the question. Raises InvalidRequest in gRPC's names."""
    temperature = session.temperature if response.temperature is None else response.temperature
    options = Options(max_new_tokens=limit_of(response, session), temperature=temperature)
    if structure := response.gridsieve and response.gridsieve.structured_outputs:
        options["json_object"], options["json_schema"] = bool(structure.json_object), structure.json_
    request = generate_request([Message("user", tuple(map(Text, texts)))], options)
    (message,) = request.prompt.messages
    return generation_pb2.LiveAsk(
        ask_id=ask_id, parts=message.parts, sampling=request.sampling, transient=response.conversation == "none"
    )


def limit_of(response: ResponseFields, session: SessionFields) -> int | None:
    """How many tokens an answer may have; None: as many as fit."""
    limit: int | Literal["inf"] | None = (
        session.max_output_tokens if response.max_output_tokens is None else response.max_output_tokens
    )
    return None if limit == "inf" else limit


def name_of(field: str, part: int | None = None) -> str:
    """The client's name of a field of gRPC's messages, and of one that a remedy quotes. part: of an item, the frame."""
    match steps_of(field):
        case "frame", name, *_ if part is not None:
            return path_of("item", "content", part, "time_s" if name == "time_s" else "image_url")
        case "open", "triggers", int(index), *rest:
            return path_of("session", "gridsieve", "triggers", index, *_of_response(rest))
        case "open", "messages", *_:
            return "session.instructions"
        case "open", *rest:
            return path_of("session", "gridsieve", *rest)
        case "pruning" | "window_tokens" | "answer_tokens" | "max_pixels", *_:
            return f"session.gridsieve.{field}"
        case steps:
            return path_of(*_of_response(steps))


def _of_response(steps: Sequence[str | int]) -> Sequence[str | int]:
    match steps:
        case ["ask", *rest]:
            return _of_response(rest)
        case ["sampling", str(name), *_] | ["json_schema" | "json_object" as name, *_]:
            return ("response", _RESPONSE_NAMES.get(name, name))
        case ["parts" | "prompt", *_]:
            return ("response", "instructions")
    return steps
