"""The forms in which checkpoints write tool calls: how each is recognised, read and held by a grammar.

    Hermes         <tool_call>                                   Qwen2.5, Qwen3, Qwen3-VL
                   {"name": "weather", "arguments": {"city": "Kyoto"}}
                   </tool_call>
    tags           <tool_call>                                   Qwen3.5 and its line, Nemotron 3
                   <function=weather>
                   <parameter=city>
                   Kyoto
                   </parameter>
                   </function>
                   </tool_call>
    pairs          <tool_call>weather                            GLM
                   <arg_key>city</arg_key>
                   <arg_value>Kyoto</arg_value>
                   </tool_call>
    a list         [TOOL_CALLS][{"name": …, "arguments": …}]     Mistral Small 3.1
                   <TOOLCALL>[{"name": …, "arguments": …}]</TOOLCALL>    Nemotron v2
    names          [TOOL_CALLS]weather[ARGS]{"city": "Kyoto"}    Mistral Small 3.2

A new form is a row of `FORMS`. Grammars are in llguidance's Lark; a `Mark` writes a text that the tokenizer may have as
one token. This module knows neither requests nor the matcher.
Source: NousResearch's Hermes function calling, and the chat templates of these models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import chain
from typing import Any, TypeAlias

from gridsieve.common.chat_templates import TemplateSource
from gridsieve.common.contract.errors import InvalidRequest, within
from gridsieve.services.generation.sampling.arguments import json_of, leaves, literals, property_of, resolved, types_of
from gridsieve.services.generation.sampling.tool_calls import Calls, Tool
from gridsieve.services.generation.sampling.unread_text import Nesting, Steps, UnreadText

# What precedes the arguments where the name comes first, as the templates teach it.
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{')
_NAME = re.compile(r"[^\s<>{}\[\]]+")
_ANY_TEXT = "(?s:.*)"
_ANY_KEY = r"/[^<>\s\x00-\x1f]+( [^<>\s\x00-\x1f]+)*/"
_JOINING = {"anyOf", "oneOf", "allOf", "$ref"}
_NOT_AT_ROOT = _JOINING | {"const", "enum", "patternProperties", "minProperties", "maxProperties"}
# Where a schema has others by name.
_DEFINED = ("$defs", "definitions")

Mark: TypeAlias = Callable[[str], str]
"""A text in a grammar: its token, `<[id]>`, where it is one that is no text to llguidance; else the text."""


class NoCall(Exception):
    """What began as a call is none."""


@dataclass(frozen=True, slots=True)
class CallForm:
    """begin, end: the marks around a call, or around all calls; end "": nothing. before, after, between: what else the
    templates write inside the marks, and between calls. id_characters: of the ids that templates take; 0: any."""

    begin: str
    end: str
    before: str = ""
    after: str = ""
    between: str = ""
    id_characters: int = 0

    @property
    def marks(self) -> set[str]:
        told = chain.from_iterable(each if isinstance(each, tuple) else (each,) for each in astuple(self))
        return {each for each in told if isinstance(each, str) and each.startswith(("<", "["))}

    def read(self, unread: UnreadText, calls: Calls) -> Steps[None]:
        """Reads what follows `begin`, with the end mark. Raises NoCall, and CutOff."""
        raise NotImplementedError

    def _read_end(self, unread: UnreadText) -> Steps[None]:
        """Reads past the end mark, unless the next call begins without it. Raises CutOff."""
        if (yield from unread.to([self.end, self.begin], _ignore)) == self.begin:
            unread.text = self.begin + unread.text

    def rules(self, place: int, tool: Tool, schema: Mapping[str, Any], mark: Mark) -> list[str]:
        """The rules of `tool_PLACE`, a call of a tool. Raises InvalidRequest for a schema that cannot be held."""
        raise NotImplementedError

    def rest(self, mark: Mark, *, single: bool) -> str:
        """What follows the first `begin` up to the end of all calls; `body` is any call."""
        one = _joined(literal(self.before), "body", literal(self.after), mark(self.end))
        return one if single else _joined(one, f"({_joined(literal(self.between), mark(self.begin), one)})*")


@dataclass(frozen=True, slots=True)
class JsonForm(CallForm):
    """Objects with name and arguments. is_list: they are written as a list. Either is read."""

    is_list: bool = False

    def read(self, unread: UnreadText, calls: Calls) -> Steps[None]:
        bracket = yield from unread.starts(["{", "["])
        if not bracket:
            raise NoCall
        nesting, mark, is_call = Nesting(1), "", bracket == "{"
        if is_call:
            mark = yield from self._read_object(unread, calls, nesting)
        while not mark and nesting.depth:
            mark = yield from unread.nested(nesting, [0, 2], self.end, _ignore)
            if not mark and nesting.depth:
                mark, is_call = (yield from self._read_object(unread, calls, nesting)), True
        if self.end and not mark:
            yield from self._read_end(unread)
        if not is_call:
            raise NoCall

    def _read_object(self, unread: UnreadText, calls: Calls, nesting: Nesting) -> Steps[str]:
        """Reads an object whose bracket was read. Returns the end mark, if that came first."""
        inside, head = nesting.depth, ["{"]
        mark = yield from unread.nested(nesting, [inside - 1, inside + 1], self.end, head.append)
        if not mark and nesting.depth > inside:
            # The arguments are the first object within the call's.
            if begun := _HEAD.match("".join(head)):
                calls.begin(_string(begun[1]))
                calls.add("{")
                yield from unread.nested(nesting, [inside], "", calls.add)
                calls.finish()
                return (yield from unread.nested(nesting, [inside - 1], self.end, _ignore))
            mark = yield from unread.nested(nesting, [inside - 1], self.end, head.append)
        name, arguments = _whole_call("".join(head))
        calls.begin(name)
        calls.add(arguments)
        calls.finish()
        return mark

    def rules(self, place: int, tool: Tool, schema: Mapping[str, Any], mark: Mark) -> list[str]:
        head = literal(f'{{"name": {json.dumps(tool.name)}, "arguments": ')
        return [f'tool_{place}: {head} arguments_{place} "}}"', f"arguments_{place}: %json {json.dumps(schema)}"]

    def rest(self, mark: Mark, *, single: bool) -> str:
        if not self.is_list:
            return CallForm.rest(self, mark, single=single)
        more = "" if single else '(", " body)*'
        return _joined('"["', "body", more, '"]"', mark(self.end))


@dataclass(frozen=True, slots=True)
class NamedForm(CallForm):
    """A name, and the arguments as JSON. by_id: the mark of an id between them, which is not read."""

    by_id: str = ""
    arguments: str = ""

    def read(self, unread: UnreadText, calls: Calls) -> Steps[None]:
        said: list[str] = []
        mark = yield from unread.to([self.by_id, self.arguments], said.append)
        if mark == self.by_id:
            yield from unread.to([self.arguments], _ignore)
        name = _name(said)
        if not (yield from unread.starts(["{"])):
            raise NoCall
        calls.begin(name)
        calls.add("{")
        yield from unread.nested(Nesting(1), [0], "", calls.add)
        calls.finish()

    def rules(self, place: int, tool: Tool, schema: Mapping[str, Any], mark: Mark) -> list[str]:
        head = f"{literal(tool.name)} {mark(self.arguments)}"
        return [f"tool_{place}: {head} arguments_{place}", f"arguments_{place}: %json {json.dumps(schema)}"]


@dataclass(frozen=True, slots=True)
class TaggedForm(CallForm):
    """Raw text between marks: of the name, of each key and of each value. lines: values are on lines of their own.

    value: the mark before a value; "": the end of the key. last: the mark after the last value; "": nothing.
    """

    name: tuple[str, str] = ("", "")
    key: tuple[str, str] = ("", "")
    value: tuple[str, str] = ("", "")
    last: str = ""
    lines: bool = False

    def read(self, unread: UnreadText, calls: Calls) -> Steps[None]:
        if self.name[0] and not (yield from unread.starts([self.name[0]])):
            raise NoCall
        said: list[str] = []
        ends = [self.last, self.end] if self.last else [self.end]
        mark = yield from unread.to([self.name[1] or self.key[0], "\n", *ends], said.append)
        name = _name(said)
        calls.begin(name)
        root = calls.schema(name)
        opening = "{"
        while True:
            if mark not in (self.key[0], *ends):
                mark = yield from unread.to([self.key[0], *ends], _ignore)
            if mark != self.key[0]:
                break
            key: list[str] = []
            yield from unread.to([self.key[1]], key.append)
            key_text = "".join(key).strip()
            calls.add(f"{opening}{_quoted(key_text)}: ")
            yield from self._read_value(unread, calls, types_of(property_of(key_text, resolved(root, root)), root))
            opening, mark = ", ", ""
        calls.add("}" if opening == ", " else "{}")
        calls.finish()
        if mark != self.end:
            yield from self._read_end(unread)

    def _read_value(self, unread: UnreadText, calls: Calls, types: frozenset[str]) -> Steps[None]:
        early: list[str] = []
        if self.value[0] and (yield from unread.to([*self.value], early.append)) == self.value[1]:
            calls.add(json_of("".join(early), types))  # its first mark is missing
        elif types == {"string"}:
            calls.add('"')
            yield from unread.to([self.value[1]], _Raw(calls.add, self.lines).say)
            calls.add('"')
        else:
            whole: list[str] = []
            yield from unread.to([self.value[1]], _Raw(whole.append, self.lines, escapes=False).say)
            calls.add(json_of("".join(whole), types))

    def rules(self, place: int, tool: Tool, schema: Mapping[str, Any], mark: Mark) -> list[str]:
        root = resolved(schema, schema)
        field = f"prompt.tools[{tool.place}].parameters"
        if unheld := sorted(_NOT_AT_ROOT & root.keys()):
            why = f"cannot be held at its root: the form of the checkpoint's calls has no {unheld[0]} of an object"
            raise InvalidRequest(why, field=field)
        given, required = root.get("properties", {}), root.get("required", [])
        names = [*given, *(name for name in required if name not in given)]
        written: list[str] = []
        rules: list[str] = []
        break_ = literal("\n")
        for number, name in enumerate(names):
            with within(f"{field}.properties.{name}"):
                value = self._value(f"v_{place}_{number}", property_of(name, root), schema, mark, rules)
            one = f"p_{place}_{number}"
            rules.append(f"{one}: {_joined(*self._key(literal(name), mark), f'({value})', break_)}")
            written.append(one if name in required else f"{one}?")
        if (others := root.get("additionalProperties", not given)) is not False:
            with within(f"{field}.additionalProperties"):
                value = self._value(f"v_{place}", {} if others is True else others, schema, mark, rules)
            listed = "|".join(map(escaped, names))
            rules.append(f"KEY_{place}: {_ANY_KEY}{listed and f' & ~/{listed}/'}")
            rules.append(f"p_{place}: {_joined(*self._key(f'KEY_{place}', mark), f'({value})', break_)}")
            written.append(f"p_{place}*")
        opening = _joined(mark(self.name[0]), literal(f"{tool.name}{self.name[1]}\n"))
        return [f"tool_{place}: {_joined(opening, *written, mark(self.last))}", *rules]

    def _key(self, key: str, mark: Mark) -> tuple[str, ...]:
        break_ = literal("\n")
        end = (break_, mark(self.value[0])) if self.value[0] else (break_,)
        return mark(self.key[0]), key, mark(self.key[1]), *end

    def _value(self, name: str, schema: Any, root: Mapping[str, Any], mark: Mark, rules: list[str]) -> str:
        """What a value is written as, with the mark after it. rules: to which those that it needs are added."""
        close = _joined(literal("\n" if self.lines else ""), mark(self.value[1]))
        defined = {each: root[each] for each in (*_DEFINED, "x-guidance") if each in root}
        written: list[str] = []
        for place, each in enumerate(leaves(schema, root)):
            of_leaf = f"{name}_{place}"
            if (listed := literals(each)) is not None:
                texts = [one if isinstance(one, str) else json.dumps(one) for one in listed]
                written += [f"{literal(text)} {close}" for text in texts if self.value[1] not in text]
            elif "string" in types_of(each, root):
                if joined := sorted(_JOINING & each.keys()):
                    raise InvalidRequest(f"cannot be held: {joined[0]} of a text that is written as it is")
                line = "\n" if self.lines else ""
                rule, value = ending(of_leaf.upper(), _pattern(each) + line, self.value[1], mark)
                rules.append(rule)
                written.append(value)
            else:
                rules.append(f"{of_leaf}: %json {json.dumps({**each, **defined})}")
                written.append(f"{of_leaf} {close}")
        if not written:
            raise InvalidRequest("cannot be held: it allows no value that can be written")
        return " | ".join(written)


class _Raw:
    """Says a raw text as a part of a JSON string, without the line breaks around it."""

    def __init__(self, say: Callable[[str], None], lines: bool, *, escapes: bool = True) -> None:
        self._say, self._lines, self._escapes = say, lines, escapes
        self._held = ""
        self._begun = False

    def say(self, text: str) -> None:
        if self._lines:
            if not self._begun:
                text = text.removeprefix("\n")
            text, self._held = self._held + text, ""
            if text.endswith("\n"):
                text, self._held = text[:-1], "\n"
        self._begun = True
        if text:
            self._say(_quoted(text)[1:-1] if self._escapes else text)


def is_a_token(marked: str) -> bool:
    """Whether a `Mark` wrote a token."""
    return marked.startswith("<[")


def escaped(text: str) -> str:
    """A text within a regular expression."""
    return re.escape(text).replace("/", r"\/")


def ending(name: str, pattern: str, mark_text: str, mark: Mark) -> tuple[str, str]:
    """A rule of this name, in capitals, and what is written with it: text of a pattern up to a mark, and the mark."""
    found, written, token = escaped(mark_text), pattern.replace("\n", r"\n"), mark(mark_text)
    if is_a_token(token):
        return f"{name}: /{written}/ & ~/(?s:.*){found}(?s:.*)/", f"{name}? {token}"
    return f"{name}: /{written}{found}/ & ~/(?s:.*){found}(?s:.+)/", name


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _pattern(schema: Mapping[str, Any]) -> str:
    """The regular expression of a string's text. Formats are not held."""
    if isinstance(pattern := schema.get("pattern"), str):
        before = "" if pattern.startswith("^") else _ANY_TEXT
        is_ended = pattern.endswith("$") and not pattern.endswith(r"\$")
        after = "" if is_ended else _ANY_TEXT
        inner = re.sub(r"(?<!\\)/", r"\/", pattern[: -1 if is_ended else None].removeprefix("^"))
        return f"{before}(?:{inner}){after}"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return _ANY_TEXT if (least, most) == (0, "") else f"(?s:.{{{least},{most}}})"


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _ignore(text: str) -> None:
    pass


def _quoted(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _name(said: Sequence[str]) -> str:
    name = "".join(said).strip()
    if not _NAME.fullmatch(name):
        raise NoCall
    return name


def _string(quoted: str) -> str:
    try:
        return _whole(json.loads(quoted, strict=False))
    except ValueError:
        return quoted.strip('"')


def _whole_call(body: str) -> tuple[str, str]:
    """Name and arguments of a call that is written in another way, such as its arguments first or as a string. Raises
    NoCall."""
    try:
        call = json.loads(body, strict=False)
        arguments = call.get("arguments", call.get("parameters")) if isinstance(call, dict) else None
        given = json.loads(arguments or "{}", strict=False) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        raise NoCall from None
    given = {} if given is None else given
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not isinstance(given, dict):
        raise NoCall
    return _whole(call["name"]), _whole(_quoted(given))


def _whole(text: str) -> str:
    """Without halves of characters, which JSON can name."""
    return text.encode(errors="replace").decode()


_TAGS = TaggedForm(
    *("<tool_call>", "</tool_call>", "\n", "\n", "\n"),
    name=("<function=", ">"),
    key=("<parameter=", ">"),
    value=("", "</parameter>"),
    last="</function>",
    lines=True,
)
_PAIRS = TaggedForm(
    *("<tool_call>", "</tool_call>", "", "", "\n"),
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
)
_HERMES = JsonForm("<tool_call>", "</tool_call>", "\n", "\n", "\n")
_NAMES = NamedForm("[TOOL_CALLS]", "", id_characters=9, by_id="[CALL_ID]", arguments="[ARGS]")

# What a template says that teaches a form, and the form. The first that is found is the checkpoint's.
FORMS: Sequence[tuple[str, CallForm]] = (
    ("<function=", _TAGS),
    ("<arg_key>", _PAIRS),
    ("<tool_call>", _HERMES),
    ("[ARGS]", _NAMES),
    ("[TOOL_CALLS]", JsonForm("[TOOL_CALLS]", "", id_characters=9, is_list=True)),
    ("<TOOLCALL>", JsonForm("<TOOLCALL>", "</TOOLCALL>", is_list=True)),
)


def form_of(templates: Sequence[TemplateSource]) -> CallForm | None:
    """The form that a checkpoint's templates teach; None: none that is read here."""
    texts = [each.text for each in templates]
    return next((form for said, form in FORMS if any(said in text and form.begin in text for text in texts)), None)
