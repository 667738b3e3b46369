"""The events of a server: OpenAI's, and under `gridsieve.` what it has no word for.

    response.created
        response.output_item.added  conversation.item.added  response.content_part.added
        response.output_text.delta*
        response.output_text.done  response.content_part.done  response.output_item.done  conversation.item.done
    response.done

An answer that does not stay has no conversation.item events. Source: OpenAI's API reference, "realtime server events".
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeAlias

from gridsieve.client.events import DROP_REASONS, STREAM_STATES, WALL_CLOCKS
from gridsieve.common.contract.errors import GridsieveError
from gridsieve.common.contract.wire import int32_array
from gridsieve.services.gateway.http.errors import body_of
from gridsieve.services.gateway.realtime.request import ResponseFields, SessionFields, UserMessage
from gridsieve.v1 import generation_pb2
from gridsieve.v1.generation_pb2 import LiveFinished, LiveResponse, LiveSlice, LiveUsage

ServerEvent: TypeAlias = dict[str, Any]
"""A value of JSON, but for pictures, which are bytes."""

_STATUSES = {
    generation_pb2.FINISH_REASON_STOP: ("completed", None),
    generation_pb2.FINISH_REASON_LENGTH: ("incomplete", "max_output_tokens"),
    generation_pb2.FINISH_REASON_CANCELLED: ("cancelled", "client_cancelled"),
}
# Generation is upgraded before gateways, so it may say what this one does not know.
_NEWER = "other"
_KINDS = {b"\x89PNG": "png", b"RIFF": "webp"}
"""Of pictures, by their first bytes. The services make JPEG."""


class Names:
    """Ids of one session's events and objects."""

    def __init__(self) -> None:
        self._session = uuid.uuid4().hex[:16]
        self._numbers = count(1)

    def new(self, kind: str) -> str:
        return f"{kind}_{self._session}_{next(self._numbers)}"

    def event(self, kind: str, **fields: Any) -> ServerEvent:
        return {"type": kind, "event_id": self.new("event"), **fields}


def dumped(event: ServerEvent) -> str:
    """The event in JSON, in ASCII, its pictures as data: URLs. One with a picture takes long: call it in a thread."""
    return json.dumps(event, separators=(",", ":"), default=_data_url)


def _data_url(picture: bytes) -> str:
    return f"data:image/{_KINDS.get(picture[:4], 'jpeg')};base64,{base64.b64encode(picture).decode()}"


def error_event(names: Names, error: GridsieveError, event_id: str | None) -> ServerEvent:
    """event_id: of the client's event that is wrong; None: the error is about none."""
    return names.event("error", error=body_of(error)["error"] | {"event_id": event_id})


def session_object(session_id: str, model: str, session: SessionFields) -> dict[str, Any]:
    """The session as it is now, in OpenAI's shape."""
    own = session.gridsieve.model_dump(exclude_none=True, by_alias=True) if session.gridsieve else {}
    return {
        "id": session_id,
        "object": "realtime.session",
        "type": "realtime",
        "model": model,
        "output_modalities": ["text"],
        "instructions": session.instructions or "",
        "max_output_tokens": session.max_output_tokens or "inf",
        "temperature": session.temperature,
        "tools": [],
        "tool_choice": "auto",
        "truncation": "auto",
        "tracing": None,
        "prompt": None,
        "expires_at": None,
        "include": None,
        "gridsieve": own,
    }


def item_events(names: Names, item: UserMessage, item_id: str, previous: str | None) -> Iterator[ServerEvent]:
    """A frame is told without its picture."""
    content = [
        {"type": part.type, "text": part.text} if part.type == "input_text" else {"type": part.type}
        for part in item.content
    ]
    told = _item(item_id, "user", "completed", content)
    for kind in ("added", "done"):
        yield names.event(f"conversation.item.{kind}", item=told, previous_item_id=previous)


def _item(item_id: str, role: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": item_id,
        "object": "realtime.item",
        "type": "message",
        "role": role,
        "status": status,
        "content": content,
    }


@dataclass(slots=True)
class ItemChain:
    """The items of a session. id: the conversation's. last: the id of its last item."""

    id: str
    last: str | None = None

    def append(self, item_id: str) -> str | None:
        """The item before it."""
        previous, self.last = self.last, item_id
        return previous


@dataclass(slots=True)
class Answer:
    """A response that is being told. limit: of its tokens; None: as many as fit. previous: the item before it.
    event_id: of the client's event that asked for it; None: a trigger did."""

    names: Names
    fields: ResponseFields
    limit: int | None
    items: ItemChain
    event_id: str | None = None
    previous: str | None = None
    id: str = ""
    item_id: str = ""
    text: str = ""
    begun: bool = False

    def __post_init__(self) -> None:
        self.id, self.item_id = self.names.new("resp"), self.names.new("item")

    @property
    def stays(self) -> bool:
        return self.fields.conversation != "none"

    def created(self) -> ServerEvent:
        return self.names.event("response.created", response=self._object("in_progress"))

    def delta(self, thought: str, text: str) -> Iterator[ServerEvent]:
        """A delta of the answer's thought, for which OpenAI has no event here, and of its text."""
        if thought:
            yield self.names.event("gridsieve.thought", response_id=self.id, delta=thought)
        if not text:
            return
        yield from self._begin()
        self.text += text
        yield self._event("output_text.delta", delta=text, **self._place())

    def finished(self, finished: LiveFinished, error: GridsieveError | None) -> Iterator[ServerEvent]:
        """error: why there is no answer; None: there is one."""
        status, reason = ("failed", None) if error else _STATUSES[finished.finished.reason]
        details: dict[str, Any] = {"type": status}
        if reason:
            details["reason"] = reason
        if error:
            told = body_of(error)["error"]
            details["error"] = {name: told[name] for name in ("type", "code", "message")}
        output = []
        if not error or self.begun:
            yield from self._begin()
            yield self._event("output_text.done", text=self.text, **self._place())
            yield self._event("content_part.done", part={"type": "text", "text": self.text}, **self._place())
            output = [self._message("completed" if status == "completed" else "incomplete")]
            yield self._event("output_item.done", output_index=0, item=output[0])
            if self.stays:
                yield self.names.event("conversation.item.done", item=output[0], previous_item_id=self.previous)
        response = self._object(status, details=details, output=output, usage=_usage(finished))
        yield self.names.event("response.done", response=response | {"gridsieve": _filmed(finished)})

    def _begin(self) -> Iterator[ServerEvent]:
        if self.begun:
            return
        self.begun = True
        yield self._event("output_item.added", output_index=0, item=self._message("in_progress"))
        if self.stays:
            item, self.previous = self._message("in_progress"), self.items.append(self.item_id)
            yield self.names.event("conversation.item.added", item=item, previous_item_id=self.previous)
        yield self._event("content_part.added", part={"type": "text", "text": ""}, **self._place())

    def _event(self, kind: str, **fields: Any) -> ServerEvent:
        return self.names.event(f"response.{kind}", response_id=self.id, **fields)

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.item_id, "output_index": 0, "content_index": 0}

    def _message(self, status: str) -> dict[str, Any]:
        content = [] if status == "in_progress" else [{"type": "output_text", "text": self.text}]
        return _item(self.item_id, "assistant", status, content)

    def _object(
        self,
        status: str,
        *,
        details: dict[str, Any] | None = None,
        output: list[dict[str, Any]] | None = None,
        usage: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        return {
            "object": "realtime.response",
            "id": self.id,
            "status": status,
            "status_details": details,
            "output": output or [],
            "conversation_id": self.items.id if self.stays else None,
            "output_modalities": ["text"],
            "max_output_tokens": self.limit or "inf",
            "metadata": self.fields.metadata,
            "usage": usage,
        }


def _usage(finished: LiveFinished) -> dict[str, Any]:
    """Tokens of the answer after pruning, and under `gridsieve` those of the session so far and the times."""
    usage, timings = finished.finished.usage, finished.finished.timings
    return {
        "input_tokens": usage.prompt_tokens,
        "input_token_details": {"cached_tokens": usage.cached_prompt_tokens, "audio_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_token_details": {"text_tokens": usage.completion_tokens, "audio_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "gridsieve": {
            "time_to_first_token_s": timings.time_to_first_token_s,
            "generate_s": timings.generate_s,
            "session": _session_usage(finished.usage),
        },
    }


def _session_usage(usage: LiveUsage) -> dict[str, int]:
    return {each.name: getattr(usage, each.name) for each in LiveUsage.DESCRIPTOR.fields}


def _filmed(told: LiveFinished | LiveSlice) -> dict[str, Any]:
    """When its last frame was filmed, by whose clock, and the frame where the session asks for it."""
    filmed: dict[str, Any] = {}
    if clock := WALL_CLOCKS.get(told.wall_clock):
        filmed |= {"wall_time_s": told.wall_time_s, "wall_clock": clock.value}
    return filmed | ({"snapshot": told.snapshot} if told.snapshot else {})


def own_event(names: Names, response: LiveResponse) -> ServerEvent | None:
    """What a session tells beside its answers; None for other responses."""
    match response.WhichOneof("response"):
        case "slice":
            piece = response.slice
            return names.event(
                "gridsieve.slice",
                first_time_s=piece.first_time_s,
                last_time_s=piece.last_time_s,
                grid={"t": piece.grid.t, "h": piece.grid.h, "w": piece.grid.w},
                kept=int32_array(piece.kept).tolist(),
                usage=_session_usage(piece.usage),
                **_filmed(piece),
            )
        case "stream":
            state = STREAM_STATES.get(response.stream.state)
            reason = response.stream.reason.removeprefix("open.source ")
            return names.event("gridsieve.stream", state=state.value if state else _NEWER, reason=reason)
        case "evicted":
            evicted = response.evicted
            return names.event("gridsieve.evicted", segments=evicted.segments, tokens=evicted.tokens)
        case "dropped":
            why = DROP_REASONS.get(response.dropped.reason)
            frames = response.dropped.frames
            return names.event("gridsieve.dropped", frames=frames, reason=why.value if why else _NEWER)
        case "restarted":
            return names.event("gridsieve.restarted", segments=response.restarted.segments)
    return None
