"""The items of a request as turns of a conversation, and the fields that these came from, for errors.

instructions                        system
message                             its role; developer is system
function_call                       joins the assistant's turn before it, or begins one
function_call_output                tool
reasoning                           nothing

Those of the responses that it continues come first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gridsieve.client.messages import pruning_message
from gridsieve.client.prompt import Message, Part, Role, Text
from gridsieve.client.tools import ToolCall
from gridsieve.common.contract.errors import path_of, steps_of, within
from gridsieve.common.contract.wire import completed
from gridsieve.services.gateway.chat.content import media, media_names, source_of
from gridsieve.services.gateway.chat.names import FieldNames, MediaNames
from gridsieve.services.gateway.chat.request import Location, Pruning
from gridsieve.services.gateway.files import Uploads
from gridsieve.services.gateway.responses.earlier import Earlier
from gridsieve.services.gateway.responses.request import (
    AnyPart,
    CallItem,
    InputImage,
    Item,
    MediaPart,
    MessageItem,
    OutputItem,
    ResponsesRequest,
)
from gridsieve.v1 import prompt_pb2

_LOCATIONS = {
    "input_image": ("image_url", "file_id"),
    "input_video": ("video_url", "input_video", "file_id"),
    "input_file": ("file_data", "file_id", "file_url"),
}
_OPTIONS = {"max_new_tokens": "max_output_tokens", "json_schema": "text.format.schema"}


@dataclass(frozen=True, slots=True)
class Places:
    """The fields that a turn came from: its item, its content, each of its parts and of its calls.

    media: by part, those of images and videos.
    """

    item: str
    content: str
    parts: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    media: Mapping[int, MediaNames] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Turn:
    message: Message
    places: Places


def turns_of(request: ResponsesRequest, earlier: Sequence[Earlier], uploads: Uploads) -> list[Turn]:
    """The request's turns, after those that it continues, whose instructions do not hold any more.

    Raises InvalidRequest for a part that cannot be what it says, and for a pruning.
    """
    if request.pruning:
        request.pruning.parsed()
    turns = [] if request.instructions is None else [_plain("system", request.instructions, "instructions")]
    for each in earlier:
        name = f"previous_response_id {each.id}"
        _add(turns, each.asked.input, f"{name}.input", each.asked, uploads)
        _add(turns, each.output, f"{name}.output", each.asked, uploads)
    _add(turns, request.input, "input", request, uploads)
    return turns


def _add(turns: list[Turn], said: str | Sequence[Item], name: str, request: ResponsesRequest, uploads: Uploads) -> None:
    """request: says how the media of these items are read."""
    if isinstance(said, str):
        turns.append(_plain("user", said, name))
        return
    for number, item in enumerate(said):
        if isinstance(item, CallItem) and turns and turns[-1].message.role == "assistant":
            turns[-1] = _with_call(turns[-1], item, f"{name}[{number}]")
        elif (turn := _turn(item, f"{name}[{number}]", request, uploads)) is not None:
            turns.append(turn)


def _plain(role: Role, text: str, name: str) -> Turn:
    return Turn(Message(role, (Text(text),)), Places(name, name, (name,)))


def _turn(item: Item, name: str, request: ResponsesRequest, uploads: Uploads) -> Turn | None:
    match item:
        case MessageItem():
            parts, places = _parts(item.content, name, f"{name}.content", request, uploads)
            return Turn(Message("system" if item.role == "developer" else item.role, parts), places)
        case CallItem():
            return _with_call(Turn(Message("assistant", ()), Places(name, name)), item, name)
        case OutputItem():
            parts, places = _parts(item.output, name, f"{name}.output", request, uploads)
            message = Message("tool", parts, tool_call_id=item.call_id, tool_name=item.name or "")
            return Turn(message, places)
    return None


def _with_call(turn: Turn, item: CallItem, name: str) -> Turn:
    call = ToolCall(item.call_id, item.name, item.arguments)
    return Turn(
        replace(turn.message, tool_calls=(*turn.message.tool_calls, call)),
        replace(turn.places, calls=(*turn.places.calls, name)),
    )


def _parts(
    content: str | list[AnyPart], item: str, name: str, request: ResponsesRequest, uploads: Uploads
) -> tuple[tuple[Part, ...], Places]:
    if isinstance(content, str):
        return (Text(content),), Places(item, name, (name,))
    names = tuple(f"{name}[{number}]" for number in range(len(content)))
    parts = tuple(_part(part, place, request, uploads) for part, place in zip(content, names, strict=True))
    of_media = {
        number: media_names(part, request, names[number], _location_of(part))
        for number, part in enumerate(content)
        if isinstance(part, MediaPart)
    }
    return parts, Places(item, name, names, media=of_media)


def _location_of(part: MediaPart) -> str:
    """The field that says where its media are."""
    name = next(name for name in _LOCATIONS[part.type] if getattr(part, name) is not None)
    return f"{name}.url" if isinstance(getattr(part, name), Location) else name


def _part(part: AnyPart, name: str, request: ResponsesRequest, uploads: Uploads) -> Part:
    if not isinstance(part, MediaPart):
        return Text(part.text)
    source = source_of(part, _LOCATIONS[part.type], name, uploads)
    pruned = part.model_copy(update={"pruning": _pruning_of(part, name, request)})
    return media(source, name, pruned, request, asks_for_image=isinstance(part, InputImage))


def _pruning_of(part: MediaPart, name: str, request: ResponsesRequest) -> Pruning | None:
    """The part's own, and what that leaves unset from its request's, which is not for the media of other turns."""
    if part.pruning is None or request.pruning is None:
        return part.pruning or request.pruning
    with within(name):
        own = pruning_message(part.pruning.parsed())
    whole = completed(own, completed(pruning_message(request.pruning.parsed()), prompt_pb2.Pruning()))
    return Pruning(**{field.name: value for field, value in whole.ListFields()})


def naming_of(turns: Sequence[Turn]) -> Callable[[str], str]:
    """The fields of the body, by those of the gRPC request."""
    places, names = [turn.places for turn in turns], FieldNames()
    names.options.update(_OPTIONS)
    for index, place in enumerate(places):
        names.media.update({(index, number): each for number, each in place.media.items()})

    def name_of(field: str) -> str:
        match steps_of(field):
            case "prompt", "messages", int(), "parts", int(), "image" | "video", *_:
                return names.name_of(field)
            case "prompt", "messages", int(index), *rest if index < len(places):
                return _name_in(places[index], rest)
            case "prompt", "messages", *_:
                return "input"
            case "prompt", "tools", *rest:
                return path_of("tools", *rest)
        return names.name_of(field)

    return name_of


def _name_in(places: Places, steps: Sequence[str | int]) -> str:
    match steps:
        case "parts", int(number), *_ if number < len(places.parts):
            return places.parts[number]
        case "parts", *_:
            return places.content
        case "tool_calls", int(number), *rest if number < len(places.calls):
            return path_of(places.calls[number], *rest)
        case ("tool_call_id",):
            return f"{places.item}.call_id"
    return path_of(places.item, *steps)
