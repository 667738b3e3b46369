"""Tool calls in an answer: the form in which a checkpoint writes them, its grammar, and reading calls from text.

    <tool_call>
    {"name": "weather", "arguments": {"city": "Kyoto"}}
    </tool_call>

This is the form of Hermes, which the templates of Qwen's models teach. This module knows neither requests nor tokens.
Source: NousResearch's Hermes function calling, and the chat templates of Qwen2.5 and Qwen3.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import groupby
from typing import Any

from framesieve.common.chat_templates import TemplateSource

_BEGIN, _END = "<tool_call>", "</tool_call>"
# What precedes the arguments where the name comes first, as the templates teach it.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_ID_BYTES = 12


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


def writes_calls(templates: Sequence[TemplateSource]) -> bool:
    """Whether the checkpoint's templates teach the form that is read here. Qwen3.5's has the same marks."""
    return any(_BEGIN in template.text and "<function=" not in template.text for template in templates)


def grammar_of(use: ToolUse, schemas: Sequence[dict[str, Any]], answer: dict[str, Any] | None) -> str:
    """The grammar of an answer, in llguidance's Lark.

    schemas: of the arguments of each tool. answer: the schema of an answer that calls nothing; None: any text.
    """
    bodies = []
    rules = []
    for place, (tool, schema) in enumerate(zip(use.tools, schemas, strict=True)):
        head = json.dumps(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        bodies.append(f"tool_{place}")
        rules.append(f'tool_{place}: {head} arguments_{place} "}}"')
        rules.append(f"arguments_{place}: %json {json.dumps(schema)}")
    begin, end = json.dumps(f"{_BEGIN}\n"), json.dumps(f"\n{_END}")
    more = "" if use.single else ' ("\\n" call)*'
    rules.append(f"call: {begin} body {end}")
    rules.append(f"body: {' | '.join(bodies)}")
    if use.required:
        start = f"call{more}"
    elif answer is not None:
        rules.append(f"document: %json {json.dumps(answer)}")
        start = f"document | call{more}"
    else:
        # The text before a call ends with the call's first word, whatever it is.
        rules.append("TEXT: /(?s:.+)/ & ~/(?s:.*<tool_call>.*)/")
        rules.append(f'lead[suffix="{_BEGIN}"]: /(?s:.*)/')
        start = f'TEXT | lead "\\n" body {end}{more}'
    return "\n".join((f"start: {start}", *rules, ""))


class _Place(Enum):
    TEXT = "text"
    HEAD = "head"  # in a call, before its arguments
    ARGUMENTS = "arguments"
    TAIL = "tail"  # after the arguments, before the end of the call


class CallReader:
    """Splits the text of one answer, as it arrives, into text and tool calls.

    Blanks before a call, between calls and after the last are not text. What begins as a call and is none stays text.
    single: later calls are left out.
    """

    def __init__(self, single: bool = False) -> None:
        self.calls = 0
        self._single = single
        self._place = _Place.TEXT
        self._unread = ""
        self._blanks = ""  # before what may be a call
        self._after_call = False  # nothing but blanks since the last call
        self._object = _ObjectEnd()

    def add(self, text: str) -> tuple[str, list[CallDelta]]:
        """The text and the parts of calls that are certain now."""
        return self._read(text, last=False)

    def end(self) -> tuple[str, list[CallDelta]]:
        """What is left where the answer ends."""
        return self._read("", last=True)

    def _read(self, text: str, last: bool) -> tuple[str, list[CallDelta]]:
        self._unread += text
        shown: list[str] = []
        deltas: list[CallDelta] = []
        before = None
        while before != (self._place, self._unread):
            before = (self._place, self._unread)
            match self._place:
                case _Place.TEXT:
                    self._read_text(shown, last)
                case _Place.HEAD:
                    self._read_head(shown, deltas, last)
                case _Place.ARGUMENTS:
                    self._read_arguments(deltas)
                case _Place.TAIL:
                    self._read_tail()
        # Clients read one part of a call at a time.
        joined = [_joined(list(parts)) for _, parts in groupby(deltas, lambda delta: delta.index)]
        return "".join(shown), [delta for delta in joined if not (self._single and delta.index)]

    def _read_text(self, shown: list[str], last: bool) -> None:
        text, begin, rest = self._unread.partition(_BEGIN)
        if begin:
            said = text.rstrip()
            shown.append(said)
            self._after_call &= not said
            self._place, self._unread, self._blanks = _Place.HEAD, rest, text[len(said) :]
            return
        if last and self._after_call and not text.strip():
            self._unread = ""
            return
        said = text if last else text[: len(text) - _may_begin(text)]
        shown.append(said)
        self._after_call &= not said
        self._unread = text[len(said) :]

    def _read_head(self, shown: list[str], deltas: list[CallDelta], last: bool) -> None:
        body, end, rest = self._unread.partition(_END)
        if head := _HEAD.match(body):
            try:
                name = json.loads(head[1], strict=False)
            except ValueError:
                name = head[1].strip('"')
            deltas.append(self._new_call(name))
            self._place, self._unread, self._object = _Place.ARGUMENTS, self._unread[head.end() :], _ObjectEnd()
            return
        if not (end or last):
            return
        self._place, self._unread = _Place.TEXT, rest
        if (call := _whole_call(body)) is None:
            shown.append(self._blanks + _BEGIN + body + end)
            self._after_call = False
        else:
            name, arguments = call
            deltas.append(replace(self._new_call(name), arguments=arguments))

    def _read_arguments(self, deltas: list[CallDelta]) -> None:
        end = self._object.find(self._unread)
        read = len(self._unread) if end is None else end
        if read:
            deltas.append(CallDelta(self.calls - 1, arguments=self._unread[:read]))
        self._unread = self._unread[read:]
        if end is not None:
            self._place = _Place.TAIL

    def _read_tail(self) -> None:
        _, end, rest = self._unread.partition(_END)
        if end:
            self._place, self._unread = _Place.TEXT, rest

    def _new_call(self, name: str) -> CallDelta:
        self.calls += 1
        self._after_call = True
        return CallDelta(self.calls - 1, f"call_{secrets.token_hex(_ID_BYTES)}", _whole(name))


def _joined(parts: Sequence[CallDelta]) -> CallDelta:
    """Parts of one call that follow each other, as one."""
    first = parts[0]
    return CallDelta(first.index, first.id, first.name, "".join(part.arguments for part in parts))


class _ObjectEnd:
    """Finds the end of a JSON object that arrives in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """How many characters of the next piece belong to the object; None: all of them, and more follow."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return place + 1
        return None


def _may_begin(text: str) -> int:
    """How many characters at the end of a text may belong to a call: blanks, and the first characters of its mark."""
    mark = next((size for size in range(len(_BEGIN) - 1, 0, -1) if text.endswith(_BEGIN[:size])), 0)
    return mark + len(text[: len(text) - mark]) - len(text[: len(text) - mark].rstrip())


def _whole_call(body: str) -> tuple[str, str] | None:
    """Name and arguments of a call that is written in another way, such as its arguments first or as a string; None if
    it is no call."""
    try:
        call = json.loads(body, strict=False)
        arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        given = json.loads(arguments or "{}", strict=False) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    given = {} if given is None else given
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(given, dict):
        return None
    return call["name"], _whole(json.dumps(given, ensure_ascii=False))


def _whole(text: str) -> str:
    """Without halves of characters, which JSON can name."""
    return text.encode(errors="replace").decode()
