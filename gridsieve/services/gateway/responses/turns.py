"""The items of a request as turns of a conversation, and the fields that these came from, for errors.

instructions                        system
message                             its role; developer is system
function_call                       joins the assistant's turn before it, or begins one
function_call_output                tool
reasoning                           the thought of the assistant's turn that follows

Those of the responses that it continues come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gridsieve.client.messages import pruning_message
from gridsieve.client.prompt import Message, Part, Role, Text
from gridsieve.client.tools import ToolCall
from gridsieve.common.contract.errors import within
from gridsieve.common.contract.wire import completed
from gridsieve.services.gateway.chat.content import (
    Turn,
    content_of,
    location_in,
    media,
    media_names,
    sound_of,
    source_of,
)
from gridsieve.services.gateway.chat.names import FieldNames, MediaNames, TurnNames
from gridsieve.services.gateway.chat.request import AudioPart, PruningFields
from gridsieve.services.gateway.files import Uploads
from gridsieve.services.gateway.responses.earlier import Earlier
from gridsieve.services.gateway.responses.request import (
    FORMAT,
    AnyPart,
    CallItem,
    InputImage,
    Item,
    MediaPart,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ResponsesRequest,
)
from gridsieve.v1 import prompt_pb2

_LOCATIONS = {
    "input_image": ("image_url", "file_id"),
    "input_video": ("video_url", "input_video", "file_id"),
    "input_file": ("file_data", "file_id", "file_url"),
}
_NO_TEXT = (Text(""),)
_OPTIONS = {"max_new_tokens": "max_output_tokens", "json_schema": "text.format.schema", "moments": FORMAT}


def turns_of(request: ResponsesRequest, earlier: Sequence[Earlier], uploads: Uploads) -> list[Turn]:
    """The request's turns, after those that it continues, whose instructions do not hold any more.

    Raises InvalidRequest for a part that cannot be what it says, and for a pruning.
    """
    if request.pruning:
        request.pruning.parsed()
    turns = [] if request.instructions is None else [_plain("system", request.instructions, "instructions")]
    for each in earlier:
        name = f"previous_response_id {each.id}"
        _append(turns, each.asked.input, f"{name}.input", each.asked, uploads)
        _append(turns, each.output, f"{name}.output", each.asked, uploads)
    _append(turns, request.input, "input", request, uploads)
    return turns


def names_of(turns: Sequence[Turn]) -> FieldNames:
    return FieldNames([turn.names for turn in turns], "input", _OPTIONS)


def _append(
    turns: list[Turn], said: str | Sequence[Item], name: str, request: ResponsesRequest, uploads: Uploads
) -> None:
    """request: says how the media of these items are read."""
    if isinstance(said, str):
        turns.append(_plain("user", said, name))
        return
    for number, item in enumerate(said):
        last = turns[-1].message if turns else None
        if isinstance(item, CallItem) and last and last.role == "assistant":
            turns[-1] = _with_call(turns[-1], item, f"{name}[{number}]")
        elif isinstance(item, ReasoningItem):
            if item.text:
                place = f"{name}[{number}]"
                turns.append(Turn(Message("assistant", _NO_TEXT, thought=item.text), TurnNames(place, place)))
        elif (turn := _turn(item, f"{name}[{number}]", request, uploads)) is not None:
            is_thought = last and last.thought and last.parts == _NO_TEXT and not last.tool_calls
            if is_thought and turn.message.role == "assistant":
                turn = replace(turn, message=replace(turn.message, thought=turns.pop().message.thought))
            turns.append(turn)


def _plain(role: Role, text: str, name: str) -> Turn:
    return Turn(Message(role, (Text(text),)), TurnNames(name, name))


def _turn(item: Item, name: str, request: ResponsesRequest, uploads: Uploads) -> Turn | None:
    def read(part: AnyPart, place: str) -> tuple[Part, MediaNames | None]:
        return _part(part, place, request, uploads)

    match item:
        case MessageItem():
            parts, names = content_of(item.content, f"{name}.content", read)
            message = Message("system" if item.role == "developer" else item.role, parts)
        case CallItem():
            return _with_call(Turn(Message("assistant", ()), TurnNames(name, name)), item, name)
        case OutputItem():
            parts, names = content_of(item.output, f"{name}.output", read)
            message = Message("tool", parts, tool_call_id=item.call_id, tool_name=item.name or "")
        case _:
            return None
    return Turn(message, replace(names, turn=name, call_id=f"{name}.call_id"))


def _with_call(turn: Turn, item: CallItem, name: str) -> Turn:
    call = ToolCall(item.call_id, item.name, item.arguments)
    return Turn(
        replace(turn.message, tool_calls=(*turn.message.tool_calls, call)),
        replace(turn.names, calls=(*turn.names.calls, name)),
    )


def _part(part: AnyPart, name: str, request: ResponsesRequest, uploads: Uploads) -> tuple[Part, MediaNames | None]:
    if isinstance(part, AudioPart):
        return sound_of(part, name, request)
    if not isinstance(part, MediaPart):
        return Text(part.text), None
    source = source_of(part, _LOCATIONS[part.type], name, uploads)
    pruned = part.model_copy(update={"pruning": _pruning_of(part, name, request)})
    item = media(source, name, pruned, request, asks_for_image=isinstance(part, InputImage))
    return item, media_names(part, request, name, location_in(part, _LOCATIONS[part.type]))


def _pruning_of(part: MediaPart, name: str, request: ResponsesRequest) -> PruningFields | None:
    """The part's own, and what that leaves unset from its request's, which is not for the media of other turns."""
    if part.pruning is None or request.pruning is None:
        return part.pruning or request.pruning
    with within(name):
        own = pruning_message(part.pruning.parsed())
    whole = completed(own, completed(pruning_message(request.pruning.parsed()), prompt_pb2.Pruning()))
    return PruningFields(**{field.name: value for field, value in whole.ListFields()})
