"""The tools that an answer may call, and its calls. This module knows neither requests nor tokens."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from gridsieve.services.generation.sampling.unread_text import UnreadText

_ID_CHARACTERS = 24
_LETTERS = string.ascii_letters + string.digits


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


class Calls:
    """The calls of one answer, as they are read. Those after a single one are left out.

    begun, finished: how many. on_begin: called before each. id_characters: of their ids; 0: as OpenAI's.
    """

    def __init__(self, use: ToolUse, unread: UnreadText, id_characters: int) -> None:
        self.begun = self.finished = 0
        self.on_begin: Callable[[], None] = lambda: None
        self._use, self._unread, self._id_characters = use, unread, id_characters
        self._deltas: list[CallDelta] = []

    @property
    def is_cut_off(self) -> bool:
        return self.begun > self.finished and not (self._use.single and self.finished)

    def begin(self, name: str) -> None:
        self.on_begin()
        self.begun += 1
        size = self._id_characters
        made = "".join(secrets.choice(_LETTERS) for _ in range(size or _ID_CHARACTERS))
        self._deltas.append(CallDelta(self.begun - 1, made if size else f"call_{made}", name))

    def add(self, arguments: str) -> None:
        self._deltas.append(CallDelta(self.begun - 1, arguments=arguments))

    def finish(self) -> None:
        self.finished += 1
        self._unread.taken.clear()

    def schema(self, name: str) -> Mapping[str, Any]:
        """Of the arguments of a tool, with all its keywords."""
        parameters = next((tool.parameters for tool in self._use.tools if tool.name == name), "")
        read = json.loads(parameters or "{}")
        return read if isinstance(read, dict) else {}

    def take(self) -> list[CallDelta]:
        # Clients read one part of a call at a time.
        joined = [_joined(list(parts)) for _, parts in groupby(self._deltas, lambda delta: delta.index)]
        self._deltas = []
        return [delta for delta in joined if not (self._use.single and delta.index)]


def _joined(parts: Sequence[CallDelta]) -> CallDelta:
    """Parts of one call that follow each other, as one."""
    first = parts[0]
    return CallDelta(first.index, first.id, first.name, "".join(part.arguments for part in parts))
