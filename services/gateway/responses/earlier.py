"""What a request says of earlier responses, from the store: `previous_response_id`, and items that it refers to."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel
from pydantic_core import to_json

from framesieve.services.gateway.http.errors import NotFound, PreviousResponseNotFound, TooLarge
from framesieve.services.gateway.http.fields import parsed
from framesieve.services.gateway.responses.request import Item, ItemReference, ResponsesRequest
from framesieve.services.gateway.responses.store import ResponseStore, Stored

_KEPT = {"input", "pruning", "mm_processor_kwargs", "media_io_kwargs"}
_WHY = "it was not stored (store: false), it has expired, or another replica of the gateway has it"


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
    """What a conversation continues of a request, as JSON: its own input, and how the media in it are read.

    Parts without a pruning of their own get the request's: a pruning of the request that continues is for new media.
    """
    kept = request.model_dump(mode="json", include=_KEPT, exclude_none=True)
    pruning = kept.pop("pruning", None)
    for item in kept["input"] if pruning and isinstance(kept["input"], list) else ():
        for parts in (item.get("content"), item.get("output")):
            for part in parts if isinstance(parts, list) else ():
                if part["type"] in ("input_image", "input_video", "input_file"):
                    part.setdefault("pruning", pruning)
    return to_json(kept)


@dataclass(frozen=True, slots=True)
class Continued:
    """A request with what it says of earlier responses: the conversation before it, and items in place of references.

    stored_bytes: of all that came from the store.
    """

    request: ResponsesRequest
    earlier: list[Earlier]
    stored_bytes: int


def continued(request: ResponsesRequest, store: ResponseStore, owner: str, limit_bytes: int) -> Continued:
    """limit_bytes: of what comes from the store, however often.

    Raises PreviousResponseNotFound, NotFound for an item, and TooLarge.
    """
    earlier: list[Earlier] = []
    stored_bytes = 0

    def count(size_bytes: int, name: str) -> None:
        nonlocal stored_bytes
        stored_bytes += size_bytes
        if stored_bytes > limit_bytes:
            text = f"needs {stored_bytes} bytes or more of stored responses, at most {limit_bytes} are allowed"
            raise TooLarge(text, field=name, remedy="send files by URL, or upload them to /v1/files")

    if request.previous_response_id is not None:
        name = "previous_response_id"
        found = store.conversation(request.previous_response_id, owner)
        if found is None:
            text = f"{request.previous_response_id[:80]!r} is no response that can be continued: {_WHY}"
            remedy = "send the items of the conversation in `input`"
            raise PreviousResponseNotFound(text, field=name, remedy=remedy)
        for each_id, each in found:
            count(each.size_bytes, name)
            earlier.append(Earlier(each_id, parsed(ResponsesRequest, each.asked), _output_of(each)))
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
    text = f"{item_id[:80]!r} is no item of a response that is stored: {_WHY}"
    raise NotFound(text, field=name, remedy="send the item itself, as clients do with store: false")


def _output_of(stored: Stored) -> list[Item]:
    return parsed(_Answered, stored.answered).output


def response_of(response_id: str, store: ResponseStore, owner: str) -> Stored:
    """Raises NotFound."""
    if (found := store.find(response_id, owner)) is None:
        raise NotFound(f"{response_id[:80]!r} is no response that is stored: {_WHY}", field="response_id")
    return found
