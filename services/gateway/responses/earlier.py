"""What a request says of earlier responses, from the store: `previous_response_id`, and items that it refers to."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel
from pydantic_core import to_json

from framesieve.services.gateway.http.errors import NotFound, PreviousResponseNotFound
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


def earlier_of(request: ResponsesRequest, store: ResponseStore, owner: str) -> list[Earlier]:
    """The conversation that a request continues. Raises PreviousResponseNotFound."""
    if request.previous_response_id is None:
        return []
    found = store.conversation(request.previous_response_id, owner)
    if found is None:
        text = f"{request.previous_response_id[:80]!r} is no response that can be continued: {_WHY}"
        remedy = "send the items of the conversation in `input`"
        raise PreviousResponseNotFound(text, field="previous_response_id", remedy=remedy)
    return [Earlier(each_id, parsed(ResponsesRequest, each.asked), _output_of(each)) for each_id, each in found]


def with_items(request: ResponsesRequest, store: ResponseStore, owner: str) -> ResponsesRequest:
    """The request with the items that it refers to in their places. Raises NotFound."""
    if isinstance(request.input, str):
        return request
    items = [
        _item(item, f"input[{number}].id", store, owner) if isinstance(item, ItemReference) else item
        for number, item in enumerate(request.input)
    ]
    return request.model_copy(update={"input": items})


def _item(reference: ItemReference, name: str, store: ResponseStore, owner: str) -> Item:
    _, _, rest = reference.id.partition("_")  # msg_RESPONSE_NUMBER
    stored = store.find(f"resp_{rest.partition('_')[0]}", owner)
    for item in _output_of(stored) if stored else ():
        if getattr(item, "id", None) == reference.id:
            return item
    text = f"{reference.id[:80]!r} is no item of a response that is stored: {_WHY}"
    remedy = "send the item itself, as clients do with `store: false`"
    raise NotFound(text, field=name, remedy=remedy)


def _output_of(stored: Stored) -> list[Item]:
    return parsed(_Answered, stored.answered).output


def response_of(response_id: str, store: ResponseStore, owner: str) -> Stored:
    """Raises NotFound."""
    if (found := store.find(response_id, owner)) is None:
        raise NotFound(f"{response_id[:80]!r} is no response that is stored: {_WHY}", field="response_id")
    return found
