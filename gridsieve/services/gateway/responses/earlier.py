"""What a request says of earlier responses, from the store: `previous_response_id`, and items that it refers to."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel

from gridsieve.services.gateway.http.body import BodyLimit
from gridsieve.services.gateway.http.errors import NotFound, PreviousResponseNotFound, TooLarge
from gridsieve.services.gateway.http.fields import parsed
from gridsieve.services.gateway.responses.request import CallItem, Item, ItemReference, ResponsesRequest
from gridsieve.services.gateway.responses.store import ResponseStore, Stored

_KEPT = {"input", "pruning", "mm_processor_kwargs", "media_io_kwargs"}
_WHY = (
    "was not stored (store: false), was deleted, has expired, made room for others, or is stored by another replica of "
    "the gateway"
)


class _Answered(BaseModel):
    """The part of a response object that a conversation continues."""

    output: list[Item]


@dataclass(frozen=True, slots=True)
class Earlier:
    """An earlier response of a conversation: what was asked, and the items of its answer."""

    id: str
    asked: ResponsesRequest
    output: list[Item]


def asked_of(request: ResponsesRequest) -> bytes:
    """What a conversation continues of a request, as JSON: its own input, and how the media in it are read."""
    return request.model_dump_json(include=_KEPT, exclude_none=True).encode()


@dataclass(frozen=True, slots=True)
class Continued:
    """A request with what it says of earlier responses: the conversation before it, and items in place of references.

    stored_bytes: of all that came from the store.
    """

    request: ResponsesRequest
    earlier: list[Earlier]
    stored_bytes: int


def continued(request: ResponsesRequest, store: ResponseStore, owner: str, limit: BodyLimit) -> Continued:
    """limit: of what comes from the store, however often.

    Raises PreviousResponseNotFound, NotFound for an item, and TooLarge.
    """
    earlier: list[Earlier] = []
    stored_bytes = 0

    def count(size_bytes: int, name: str) -> None:
        nonlocal stored_bytes
        stored_bytes += size_bytes
        if stored_bytes > limit.size_bytes:
            needed = f"needs {stored_bytes} bytes or more of stored responses"
            text = f"{needed}, at most {limit.size_bytes} are allowed: {limit.setting}"
            raise TooLarge(text, field=name, remedy=limit.remedy)

    if request.previous_response_id is not None:
        name = "previous_response_id"
        found = store.conversation(request.previous_response_id, owner)
        if found is None:
            wanted = f"{request.previous_response_id[:80]!r} is no response that can be continued"
            text = f"{wanted}: it, or one before it, {_WHY}"
            remedy = "send the items of the conversation in `input`"
            raise PreviousResponseNotFound(text, field=name, remedy=remedy)
        for each_id, each in found:
            count(each.size_bytes, name)
            output = [item for item in _output_of(each) if not _is_half_a_call(item)]
            earlier.append(Earlier(each_id, parsed(ResponsesRequest, each.asked), output))
    if isinstance(request.input, list):
        items = list(request.input)
        for number, item in enumerate(items):
            if isinstance(item, ItemReference):
                stored = store.find(f"resp_{item.id.partition('_')[2].partition('_')[0]}", owner)  # msg_RESPONSE_NUMBER
                count(len(stored.answered) if stored else 0, f"input[{number}]")
                items[number] = _item(item.id, stored, f"input[{number}].id")
        request = request.model_copy(update={"input": items})
    return Continued(request, earlier, stored_bytes)


def _item(item_id: str, stored: Stored | None, name: str) -> Item:
    for item in _output_of(stored) if stored else ():
        if getattr(item, "id", None) == item_id:
            return item
    text = f"{item_id[:80]!r} is no item of a response that is stored: it {_WHY}"
    raise NotFound(text, field=name, remedy="send the item itself, as clients do with store: false")


def _is_half_a_call(item: Item) -> bool:
    """A call that the answer's length cut off: its arguments are no JSON, and nobody can send its result."""
    return isinstance(item, CallItem) and item.status == "incomplete"


def _output_of(stored: Stored) -> list[Item]:
    return parsed(_Answered, stored.answered).output


def response_of(response_id: str, store: ResponseStore, owner: str) -> Stored:
    """Raises NotFound."""
    if (found := store.find(response_id, owner)) is None:
        raise NotFound(f"{response_id[:80]!r} is no response that is stored: it {_WHY}", field="response_id")
    return found
