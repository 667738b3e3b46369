"""The tools that an answer may call, and its calls. This module knows neither requests nor tokens."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an answer may call.

    parameters: the JSON schema of its arguments, as text; "": any object. place: among the prompt's tools.
    """

    name: str
    parameters: str = field(repr=False)
    strict: bool
    place: int


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What an answer may call.

    required: it is calls and nothing else. single: at most one of them.
    """

    tools: tuple[Tool, ...]
    required: bool = False
    single: bool = False

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar holds the calls; else they are whatever the model writes."""
        return self.required or any(tool.strict for tool in self.tools)


@dataclass(frozen=True, slots=True)
class CallDelta:
    """The next part of call `index` of an answer: id and name in its first part, then characters of the arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""
