"""The arguments of a call that is written in tags: JSON of raw text, by the schemas of the parameters.

<parameter=city>Kyoto       {"city": "Kyoto", …        a string is raw, whatever it looks like
<parameter=days>3           … "days": 3, …             anything else is JSON, or a word of Python
<parameter=metric>True      … "metric": true}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

Schema: TypeAlias = Mapping[str, Any]

_ANY = frozenset({"string", "integer", "number", "boolean", "null", "object", "array"})
_WORDS = {"True": "true", "False": "false", "None": "null"}
_OWN = {"type", "properties"}
_REFERENCES = 16
"""From one to the next, how many are followed."""


def resolved(schema: Any, root: Schema) -> Schema:
    """A schema, or the one that it refers to by name, or as all that it says. root: whose definitions are meant.

    It keeps a `$ref` that leads nowhere."""
    for _ in range(_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        reference, several = schema.get("$ref"), schema.get("allOf")
        if isinstance(reference, str):
            base, *steps = reference.split("/")
            found: Any = root if base == "#" else None
            for step in steps:
                found = found.get(step) if isinstance(found, Mapping) else None
            if not isinstance(found, Mapping):
                break
            schema = found
        elif isinstance(several, list) and len(several) == 1 and not _OWN & schema.keys():
            [schema] = several
        else:
            break
    return schema if isinstance(schema, Mapping) else {}


def property_of(name: str, schema: Schema) -> Any:
    """The schema of a property of an object."""
    listed, others = schema.get("properties"), schema.get("additionalProperties")
    if isinstance(listed, Mapping) and name in listed:
        return listed[name]
    return others if isinstance(others, Mapping) else {}


def leaves(schema: Any, root: Schema) -> list[Schema]:
    """The schemas of which a value satisfies one, without references and alternatives; each once."""
    found: list[Schema] = []
    seen: set[int] = set()
    waiting = [schema]
    while waiting:
        each = resolved(waiting.pop(), root)
        if id(each) in seen:
            continue
        seen.add(id(each))
        several = _alternatives(each) if literals(each) is None else []
        waiting += reversed(several)
        if not several:
            found.append(each)
    return found


def _alternatives(schema: Schema) -> list[Any]:
    if "properties" in schema or isinstance(schema.get("type"), str):
        return []  # they say what is alike in them all, too
    for name in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(name), list):
            return several
    kinds = schema.get("type")
    return [{**schema, "type": each} for each in kinds] if isinstance(kinds, list) else []


def literals(schema: Schema) -> list[Any] | None:
    """The values that a schema lists; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """JSON Schema's names of the types that a value may have."""
    return frozenset().union(*map(_types_of_leaf, leaves(schema, root))) or _ANY


def _types_of_leaf(schema: Schema) -> frozenset[str]:
    if (listed := literals(schema)) is not None:
        return frozenset(map(_type_of, listed))
    if isinstance(kind := schema.get("type"), str):
        return frozenset({kind, "integer"}) if kind == "number" else frozenset({kind})
    for part, kind in (("properties", "object"), ("items", "array"), ("pattern", "string")):
        if part in schema:
            return frozenset({kind})
    return _ANY


def json_of(text: str, types: frozenset[str]) -> str:
    """A value as JSON text: JSON of one of its types, or a word of Python for it; else a string."""
    written = text.strip()
    written = _WORDS.get(written, written)
    try:
        value: Any = json.loads(written, parse_constant=_refused)
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, float) and value.is_integer() and "number" not in types and "integer" in types:
        return str(int(value))
    return json.dumps(text, ensure_ascii=False) if isinstance(value, str) or _type_of(value) not in types else written


def _refused(constant: str) -> None:
    raise ValueError(constant)


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case dict():
            return "object"
    return "array"
