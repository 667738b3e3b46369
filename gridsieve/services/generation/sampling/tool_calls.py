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

from gridsieve.common.chat_templates import TemplateSource

_BEGIN, _END = "<tool_call>", "</tool_call>"
# What precedes the arguments where the name comes first, as the templates teach it.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_ID_BYTES = 12
_PIECE_CHARACTERS = 512


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
    """Splits the text of one answer, as it arrives, into text and tool calls. It reads each character once.

    Blanks before a call, between calls and after the last are not text. What begins as a call and is none stays text.
    single: later calls are left out.
    """

    def __init__(self, single: bool = False) -> None:
        self.calls = 0
        self._single = single
        self._after_call = False  # nothing but blanks since the last call
        self._blanks: list[str] = []  # after the text that was shown; not text if a call follows
        self._enter(_Place.TEXT)

    def read(self, text: str) -> tuple[str, list[CallDelta]]:
        """The text and the parts of calls that are certain now."""
        shown: list[str] = []
        deltas: list[CallDelta] = []
        # In pieces, because what follows the end of a place is copied.
        for begin in range(0, len(text), _PIECE_CHARACTERS):
            piece = text[begin : begin + _PIECE_CHARACTERS]
            while piece:
                match self._place:
                    case _Place.TEXT:
                        piece = self._read_text(piece, shown)
                    case _Place.HEAD:
                        piece = self._read_head(piece, shown, deltas)
                    case _Place.ARGUMENTS:
                        piece = self._read_arguments(piece, deltas)
                    case _Place.TAIL:
                        piece = self._read_tail(piece)
        return self._certain(shown, deltas)

    def end(self) -> tuple[str, list[CallDelta]]:
        """What is left where the answer ends."""
        shown: list[str] = []
        deltas: list[CallDelta] = []
        if self._place is _Place.HEAD:
            self._end_call("".join(self._call), "", shown, deltas)
        elif self._place is _Place.TEXT and (self._mark or not self._after_call):
            shown += (*self._blanks, self._mark)
        return self._certain(shown, deltas)

    def _certain(self, shown: Sequence[str], deltas: Sequence[CallDelta]) -> tuple[str, list[CallDelta]]:
        # Clients read one part of a call at a time.
        joined = [_joined(list(parts)) for _, parts in groupby(deltas, lambda delta: delta.index)]
        return "".join(shown), [delta for delta in joined if not (self._single and delta.index)]

    def _enter(self, place: _Place) -> None:
        self._place = place
        self._mark = ""  # the end of the text so far, if the mark that ends this place may begin there
        self._call: list[str] = []  # a call up to its arguments
        self._nesting: _Nesting | None = _Nesting()  # of the call, or its arguments; None: they cannot begin any more

    # Each of these takes a text that arrived, and returns what follows the end of the place.

    def _read_text(self, text: str, shown: list[str]) -> str:
        text, begin, rest = (self._mark + text).partition(_BEGIN)
        self._mark = "" if begin else _start_of(_BEGIN, text)
        text = text.removesuffix(self._mark)
        if said := text.rstrip():
            shown += (*self._blanks, said)
            self._blanks = []
            self._after_call = False
        self._blanks.append(text[len(said) :])
        if begin:
            self._enter(_Place.HEAD)
        return rest

    def _read_head(self, text: str, shown: list[str], deltas: list[CallDelta]) -> str:
        end = self._end_of_call(text)
        self._call.append(text[:end])
        # The arguments are the first object within the call's.
        if self._nesting and (begun := self._nesting.find(2, text[:end])):
            self._nesting = None
            if head := _HEAD.match("".join(self._call[:-1]) + text[:begun]):
                try:
                    name = json.loads(head[1], strict=False)
                except ValueError:
                    name = head[1].strip('"')
                deltas.append(self._new_call(name))
                self._enter(_Place.ARGUMENTS)
                return text[begun - 1 :]
        if end is None:
            return ""
        self._end_call("".join(self._call).removesuffix(_END), _END, shown, deltas)
        return text[end:]

    def _read_arguments(self, text: str, deltas: list[CallDelta]) -> str:
        assert self._nesting
        end = self._nesting.find(0, text)
        deltas.append(CallDelta(self.calls - 1, arguments=text[:end]))
        if end is None:
            return ""
        self._enter(_Place.TAIL)
        return text[end:]

    def _read_tail(self, text: str) -> str:
        if (end := self._end_of_call(text)) is None:
            return ""
        self._enter(_Place.TEXT)
        return text[end:]

    def _end_of_call(self, text: str) -> int | None:
        """How many characters of the text there are up to the end of the mark that ends a call; None: it has none."""
        before, end, _ = (self._mark + text).partition(_END)
        read = len(self._mark)
        self._mark = "" if end else _start_of(_END, before)
        return len(before) + len(end) - read if end else None

    def _end_call(self, body: str, end: str, shown: list[str], deltas: list[CallDelta]) -> None:
        """Reads a call that does not begin with its name, once it is complete."""
        if (call := _whole_call(body)) is None:
            shown += (*self._blanks, _BEGIN, body, end)
            self._blanks = []
            self._after_call = False
        else:
            name, arguments = call
            deltas.append(replace(self._new_call(name), arguments=arguments))
        self._enter(_Place.TEXT)

    def _new_call(self, name: str) -> CallDelta:
        self.calls += 1
        self._after_call = True
        self._blanks = []
        return CallDelta(self.calls - 1, f"call_{secrets.token_hex(_ID_BYTES)}", _whole(name))


def _joined(parts: Sequence[CallDelta]) -> CallDelta:
    """Parts of one call that follow each other, as one."""
    first = parts[0]
    return CallDelta(first.index, first.id, first.name, "".join(part.arguments for part in parts))


class _Nesting:
    """How deep JSON that arrives in pieces is nested."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, depth: int, text: str) -> int | None:
        """How many characters of the next piece lead to a depth, with its bracket; None: all of them do not."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[}]":
                self._depth += 1 if character in "{[" else -1
                if self._depth == depth:
                    return place + 1
        return None


def _start_of(mark: str, text: str) -> str:
    """The end of a text in which a mark may begin."""
    return next((mark[:size] for size in range(len(mark) - 1, 0, -1) if text.endswith(mark[:size])), "")


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
