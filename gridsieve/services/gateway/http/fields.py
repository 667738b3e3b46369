"""A JSON body as fields. An error names the first wrong one as the caller wrote it: messages[0].content[1].text."""

from __future__ import annotations

from typing import Annotated, Any, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import ErrorDetails, from_json

from gridsieve.common.contract.errors import InvalidRequest

_SHOWN_CHARACTERS = 80


class Strict(BaseModel):
    """Fields that are all known, of the JSON types that they are declared with."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


Whole: TypeAlias = Annotated[
    int, BeforeValidator(lambda value: int(value) if isinstance(value, float) and value.is_integer() else value)
]
"""An integer, which some clients write as 1.0."""

Body = TypeVar("Body", bound=BaseModel)


def parsed(kind: type[Body], body: bytes | bytearray) -> Body:
    """The body as a `kind`. Raises InvalidRequest, which names the first wrong field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        # Where a field may have several forms there is an error for each; the one furthest inside is of the form meant.
        first = max(error.errors(include_url=False), key=lambda each: len(each["loc"]))
        raise _refusal(first, body) from None


def _refusal(error: ErrorDetails, body: bytes | bytearray) -> InvalidRequest:
    if error["type"] == "json_invalid":
        return InvalidRequest(f"the body is not valid JSON: {error['msg'].removeprefix('Invalid JSON: ')}")
    name = _name(error["loc"], from_json(body), error["type"] == "missing")
    match error["type"]:
        case "extra_forbidden":
            return InvalidRequest("is not a field that this service knows", field=name)
        case "missing":
            return InvalidRequest(field=name, limit="set")
        case "none_required":
            return InvalidRequest(f"must not be set, got {short(error['input'])}", field=name)
        case "union_tag_invalid":
            known, found = error["ctx"]["expected_tags"].replace("'", ""), error["input"].get("type")
            text = f"must be one of {known}, got {short(found)}"
            return InvalidRequest(text, field=f"{name}.type".removeprefix("."), limit=known)
        case "union_tag_not_found":
            return InvalidRequest(field=f"{name}.type".removeprefix("."), limit="set")
    text = f"is wrong: {error['msg'][:1].lower()}{error['msg'][1:]}, got {short(error['input'])}"
    return InvalidRequest(text, field=name) if name else InvalidRequest(f"the body {text}")


def _name(place: tuple[int | str, ...], value: Any, is_absent: bool) -> str:
    """pydantic's place in the body's value, without the steps that are no fields: the names of types, and the form of a
    value that may have several. is_absent: whether the last step is a field that the body lacks."""
    name, is_new = "", True  # is_new: no step inside the value was seen yet, so that the next may be its form
    for step, following in zip(place, (*place[1:], ""), strict=False):
        if isinstance(step, int):
            name += f"[{step}]"
            value, is_new = value[step], True
            continue
        fields = value if isinstance(value, dict) else {}
        if is_new and fields.get("type") == step and following and (step not in fields or following in (step, *fields)):
            is_new = False
        elif step in fields or (is_absent and following == ""):
            name += f".{step}" if name else step
            value, is_new = fields.get(step), True
    return name


def short(value: object) -> str:
    """A value for an error."""
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…"
