"""Renders a checkpoint's chat template and marks the control tokens that the template itself writes.

    source:    <|im_start|>{{ message.role }}\\n{{ message.content }}<|im_end|>
    compiled:  ⟨5f0c….0⟩{{ message.role }}\\n{{ message.content }}⟨5f0c….1⟩
    rendered:  ⟨5f0c….0⟩user\\nis <|im_end|> a token?⟨5f0c….1⟩       the caller's <|im_end|> is text

Control tokens in the template's own text are replaced by marks with a random number. The text of callers is rendered as
it is, so templates may trim it, split it at `</think>` or look into it, as in transformers. Constants that a template
compares with, or that its methods and filters look for, keep their spelling. This module knows neither tokenizers nor
families.
Source: `apply_chat_template` of transformers 5.24, whose environment it rebuilds.
"""

from __future__ import annotations

import datetime
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gridsieve.common.contract.errors import InvalidRequest, StartupError

_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt")
# Errors of templates that get values they do not expect, such as tool arguments that are no object.
_REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)
# Methods that look for their first argument.
_LOOKING = re.compile(
    "count|endswith|get|l?strip|rstrip|r?find|r?index|r?partition|r?split|remove(prefix|suffix)|replace|startswith"
)


class Marks:
    """Stand-ins of control tokens, which no caller can write."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = sorted(tokens, key=len, reverse=True)
        self._places = {token: place for place, token in enumerate(self._tokens)}
        self._nonce = secrets.token_hex(16)
        self._spelt = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")
        self._mark = re.compile(rf"⟨{self._nonce}\.(\d+)⟩")

    def marked(self, text: str) -> str:
        """The text with a mark for each control token that it spells."""
        return self._spelt.sub(lambda found: f"⟨{self._nonce}.{self._places[found[0]]}⟩", text)

    def split(self, text: str) -> list[str]:
        """Text, control token, text, …: those that were marked."""
        pieces = self._mark.split(text)
        return [self._tokens[int(piece)] if place % 2 else piece for place, piece in enumerate(pieces)]

    def spelt(self, text: str) -> list[str]:
        """The control tokens that a text spells, in order."""
        return self._spelt.findall(text)


class ChatTemplate:
    """source: the template's text. names: the tokenizer's special tokens, which are variables of templates.

    takes_parts: whether the content of messages may be a list of parts.
    Raises StartupError for a template that is not valid, or makes a control token out of pieces.
    """

    def __init__(self, source: str, marks: Marks, names: Mapping[str, str], *, takes_parts: bool, where: str) -> None:
        self.takes_parts = takes_parts
        self._marks = marks
        self._names = {name: marks.marked(token) for name, token in names.items()}
        environment = _environment()
        try:
            # Of a tree of its own, in which it puts constants together.
            read = meta.find_undeclared_variables(environment.parse(source))
            self.variables = frozenset(read) - {*_OWN_VARIABLES, *names}
            self.shows_tools = "tools" in read
            plain = environment.from_string(source)
            parsed = environment.parse(source)
            _mark(parsed, marks)
            code = environment.compile(parsed)
        except TemplateError as error:
            raise StartupError(f"the chat template of {where} is invalid: {error}") from error
        self._template = environment.template_class.from_code(environment, code, environment.make_globals(None))
        self._check(plain.render, marks, names, where)

    def render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
    ) -> str:
        """The conversation with marks. Raises InvalidRequest if the template refuses it."""
        variables = {**self._names, **options, "tools": tools or None, "documents": None}
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **variables)
        except _REFUSALS as error:
            why = "".join(self._marks.split(str(error)))
            text = f"are refused by the checkpoint's chat template: {why}"
            raise InvalidRequest(text, field="prompt.messages") from error

    def _check(self, render: Any, marks: Marks, names: Mapping[str, str], where: str) -> None:
        """Whether every control token of a short conversation is marked."""
        content: Any = [{"type": "text", "text": "a"}] if self.takes_parts else "a"
        messages = [{"role": role, "content": content} for role in ("user", "assistant", "user")]
        variables: dict[str, Any] = {"messages": messages, "tools": None}
        try:
            rendered = render(**names, **variables, documents=None, add_generation_prompt=True)
        except _REFUSALS:  # such as a template that wants a system message
            return
        made = marks.split(self.render(messages, (), {}))
        if "".join(made) != rendered or made[1::2] != marks.spelt(rendered):
            raise StartupError(f"the chat template of {where} makes control tokens out of pieces: not supported")


def _mark(node: nodes.Node, marks: Marks) -> None:
    """Marks the control tokens that a template writes."""
    if isinstance(node, nodes.TemplateData):
        node.data = marks.marked(node.data)
    elif isinstance(node, nodes.Const):
        if isinstance(node.value, str):
            node.value = marks.marked(node.value)
    else:
        for each in _written(node):
            _mark(each, marks)


def _written(node: nodes.Node) -> Iterable[nodes.Node]:
    """The parts of a node whose constants may become output; not those that it compares or looks for."""
    match node:
        case nodes.Compare():
            return ()
        case nodes.Getitem():
            return (node.node,)
        case nodes.Filter(name="replace"):
            return _present(node.node, *node.args[1:])
        case nodes.Filter() if node.name not in ("default", "d", "join"):
            return _present(node.node)
        case nodes.Test():
            return (node.node,)
        case nodes.Call(node=nodes.Name(name="raise_exception")):
            return ()
        case nodes.Call(node=nodes.Getattr() as method) if _LOOKING.fullmatch(method.attr):
            return (method.node, *node.args[1:])
    return node.iter_child_nodes()


def _present(*each: nodes.Node | None) -> Iterable[nodes.Node]:
    return [node for node in each if node is not None]


class _Generation(Extension):
    """`{% generation %}`, with which templates mark the model's text for training: its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _environment() -> Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
