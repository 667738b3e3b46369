"""The events of a client: OpenAI's fields, and ours under `gridsieve`.

Each field is used or refused by name. Those that have no meaning here are accepted at their neutral value only, because
clients send them unasked. Source: OpenAI's API reference, "realtime client events".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, RootModel
from pydantic_core import from_json

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.gateway.chat.request import (
    EmptyList,
    Int32,
    Nothing,
    One,
    PruningFields,
    StructuredOutputs,
    Unused,
)
from gridsieve.services.gateway.http.fields import Strict, parsed
from gridsieve.services.gateway.responses.request import Reasoning

Count: TypeAlias = Annotated[Int32, Field(ge=0)]
Pixels: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Metadata: TypeAlias = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
MAX_ID_CHARACTERS = 512
EventId: TypeAlias = Annotated[str, Field(max_length=MAX_ID_CHARACTERS)]
"""As long as OpenAI's: what a client names is kept and told again."""

_AUDIO = "is about audio, which is not served: a session sees frames and reads text, and answers in text"
_KEPT = "is not served: what a session has seen stays until it is evicted"
REFUSED = {
    "input_audio_buffer.append": _AUDIO,
    "input_audio_buffer.clear": _AUDIO,
    "input_audio_buffer.commit": _AUDIO,
    "output_audio_buffer.clear": _AUDIO,
    "conversation.item.truncate": _AUDIO,
    "conversation.item.delete": _KEPT,
    "conversation.item.retrieve": _KEPT,
}
"""OpenAI's other events, and what is said to them."""


class Sampling(Strict):
    """Ours, of a response. structured_outputs: as in a chat request."""

    structured_outputs: StructuredOutputs | None = None


class AudioFields(Strict):
    """What is switched off, and what has no meaning without it."""

    format: dict[str, Any] | None = None
    speed: One | None = None
    noise_reduction: Nothing = None
    transcription: Nothing = None
    turn_detection: Nothing = None
    voice: Nothing = None


class Audio(Strict):
    input: AudioFields | None = None
    output: AudioFields | None = None


class Neutral(Strict):
    """Fields of sessions and of responses that have no meaning here."""

    output_modalities: list[Literal["text"]] | None = None
    audio: Audio | None = None
    prompt: Nothing = None
    reasoning: Reasoning | None = None
    tools: EmptyList | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: bool | None = None


class ResponseFields(Neutral):
    """A question. instructions: its text, after that of the items before it. conversation: none: neither it nor its
    answer stays."""

    conversation: Literal["auto", "none"] | None = None
    instructions: str | None = None
    max_output_tokens: Int32 | Literal["inf"] | None = None
    temperature: float | None = None
    metadata: Metadata | None = None
    gridsieve: Sampling | None = None

    input: Nothing = None


class Trigger(Strict):
    """A question that the session asks by itself: gRPC's LiveTrigger."""

    response: ResponseFields
    every_s: float | None = None
    on_change: float | None = None


class LiveFields(Strict):
    """What a session has beyond OpenAI's fields: gRPC's LiveOpen."""

    source: str | None = None
    source_name: str | None = None
    reopens: bool | None = None
    snapshots: Literal["answers", "slices"] | None = None

    pruning: PruningFields | None = None
    fps: float | None = None
    max_pixels: Pixels | None = None
    window_tokens: Count | None = None
    window_s: float | None = None
    answer_tokens: Count | None = None
    triggers: list[Trigger] | None = None


class SessionFields(Neutral):
    """The last fields are those that clients echo of `session.created`."""

    type: Literal["realtime"] | None = None
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[Int32, Field(ge=1)] | Literal["inf"] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    gridsieve: LiveFields | None = None

    include: EmptyList | None = None
    tracing: Nothing = None
    truncation: Literal["auto"] | None = None
    id: Unused = None
    object: Literal["realtime.session"] | None = None
    expires_at: Nothing = None

    @property
    def source(self) -> str | None:
        """The URL of a camera, whose frames the session sees in place of the client's."""
        return self.gridsieve.source if self.gridsieve else None

    def updated(self, other: SessionFields) -> SessionFields:
        """With the fields that another one has; those of `gridsieve` one by one."""
        changed = {name: getattr(other, name) for name in other.model_fields_set}
        if self.gridsieve and other.gridsieve:
            own = {name: getattr(other.gridsieve, name) for name in other.gridsieve.model_fields_set}
            changed["gridsieve"] = self.gridsieve.model_copy(update=own)
        return self.model_copy(update=changed)


class Part(Strict):
    detail: Unused = None
    audio: Nothing = None
    transcript: Nothing = None


class InputText(Part):
    type: Literal["input_text"]
    text: str

    image_url: Nothing = None


class InputImage(Part):
    """A frame. image_url: a data: URL. time_s: ours, when it was filmed; unset: when it arrived."""

    type: Literal["input_image"]
    image_url: str
    time_s: float | None = None

    text: Nothing = None


class UserMessage(Strict):
    """An item. Texts are kept for the next response."""

    type: Literal["message"]
    role: Literal["user"]
    content: Annotated[
        list[Annotated[InputText | InputImage, Field(discriminator="type")]], Field(min_length=1, max_length=64)
    ]
    id: Annotated[str, Field(max_length=128)] | None = None

    object: Literal["realtime.item"] | None = None
    status: Unused = None


class SessionUpdate(Strict):
    type: Literal["session.update"]
    session: SessionFields
    event_id: EventId | None = None


class ItemCreate(Strict):
    type: Literal["conversation.item.create"]
    item: UserMessage
    event_id: EventId | None = None
    previous_item_id: str | None = None


class ResponseCreate(Strict):
    type: Literal["response.create"]
    response: ResponseFields | None = None
    event_id: EventId | None = None


class ResponseCancel(Strict):
    type: Literal["response.cancel"]
    response_id: str | None = None
    event_id: EventId | None = None


ClientEvent: TypeAlias = SessionUpdate | ItemCreate | ResponseCreate | ResponseCancel


class _Message(RootModel[ClientEvent]):
    root: Annotated[ClientEvent, Field(discriminator="type")]


def parse(message: bytes) -> tuple[ClientEvent | InvalidRequest, str | None]:
    """The event, or why there is none, which names the first wrong field; and the id that the client gave it."""
    try:
        event = parsed(_Message, message).root
    except InvalidRequest as error:
        kind, event_id = _strings(message, "type", "event_id")
        return InvalidRequest(REFUSED[kind], field=kind) if kind in REFUSED else error, event_id
    return event, event.event_id


def event_id_of(message: bytes) -> str | None:
    """The id that the client gave an event, whatever else is wrong with it."""
    (event_id,) = _strings(message, "event_id")
    return event_id


def _strings(message: bytes, *names: str) -> list[str | None]:
    """Those of an event's fields that are short strings."""
    try:
        value: Any = from_json(message)
    except ValueError:
        value = None
    found = [value.get(name) if isinstance(value, dict) else None for name in names]
    return [each if isinstance(each, str) and len(each) <= MAX_ID_CHARACTERS else None for each in found]
