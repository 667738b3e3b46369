"""What a client's events ask for, in gRPC's messages, and where it wrote the fields that errors name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from gridsieve.client.live_events import Snapshots
from gridsieve.client.messages import live_ask, live_open
from gridsieve.client.prompt import LiveOptions, Sampling, Trigger
from gridsieve.common.contract.errors import InvalidRequest, path_of, steps_of
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
    triggers = []
    for index, each in enumerate(own.triggers or ()):
        question, transient = each.response.instructions, each.response.conversation == "none"
        if not question:
            raise InvalidRequest(field=f"open.triggers[{index}].response.instructions", limit="set")
        sampling = _sampling(each.response, session)
        triggers.append(
            Trigger(question, every_s=each.every_s, on_change=each.on_change, transient=transient, sampling=sampling)
        )
    options = LiveOptions(
        system=session.instructions,
        pruning=own.pruning.parsed() if own.pruning else None,
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
        snapshots=Snapshots(own.snapshots) if own.snapshots else None,
        triggers=triggers,
    )
    return live_open(options)


def ask_message(
    ask_id: str, texts: Sequence[str], response: ResponseFields, session: SessionFields
) -> generation_pb2.LiveAsk:
    """texts: the question. Raises InvalidRequest in gRPC's names."""
    return live_ask(ask_id, texts, response.conversation == "none", _sampling(response, session))


def _sampling(response: ResponseFields, session: SessionFields) -> Sampling:
    temperature = session.temperature if response.temperature is None else response.temperature
    sampling = Sampling(max_new_tokens=limit_of(response, session), temperature=temperature)
    if structure := response.gridsieve and response.gridsieve.structured_outputs:
        sampling["json_object"], sampling["json_schema"] = bool(structure.json_object), structure.json_
    return sampling


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
