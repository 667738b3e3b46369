"""Tools that a model may call, and its calls.

    weather = Tool("weather", "The weather of a city.", {"type": "object", "properties": {"city": {"type": "string"}}})
    answer = await client.ask(None, "Is it raining in Kyoto?", tools=[weather])
    for call in answer.tool_calls:
        call.name, json.loads(call.arguments)

The result goes back with the turns so far: see `Message`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    description: what it does, for the model. parameters: the JSON schema of its arguments; None: any object.
    strict: arguments satisfy the schema even where the model is free to call or not.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = field(default=None, hash=False)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made. arguments: JSON text, an object unless the completion was cut off."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """The next part of call `index` of a completion: its id and name in the first part, then characters of its
    arguments."""

    index: int
    id: str
    name: str
    arguments: str


def joined_calls(deltas: Sequence[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls of one completion."""
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        before = calls.get(delta.index, ToolCall("", "", ""))
        calls[delta.index] = ToolCall(
            before.id or delta.id, before.name or delta.name, before.arguments + delta.arguments
        )
    return tuple(calls[index] for index in sorted(calls))
