"""The messages and tools of a prompt, as chat templates take them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gridsieve.common.contract.plan import Modality


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call in an earlier turn of the model. arguments: of the function, by name."""

    id: str
    name: str
    arguments: Mapping[str, Any] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Turn:
    """One message: its role as chat templates name it, and its text and media in order.

    tool_calls: of the model. tool_call_id, tool_name: of the call whose result it is. thought: of the model before it.
    """

    role: str
    parts: tuple[str | Modality, ...]
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    tool_name: str = ""
    thought: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. description: None: it has none. parameters: the JSON schema of arguments."""

    name: str
    description: str | None
    parameters: Mapping[str, Any] = field(hash=False)
