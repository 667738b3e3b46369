"""Structured output: which tokens may come next, so that an answer is a JSON document of its schema, or calls tools.

llguidance computes the masks: a wheel of three megabytes without dependencies, where xgrammar's needs Triton. This
module knows neither requests nor the model.
Source: the documentation of llguidance, "JSON schema".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray
from torch import Tensor

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.compute.transfers import to_device
from gridsieve.services.generation.sampling.answer_grammar import grammar_of
from gridsieve.services.generation.sampling.call_forms import CallForm, literal
from gridsieve.services.generation.sampling.thoughts import Thought
from gridsieve.services.generation.sampling.tool_calls import Tool, ToolUse

MAX_SCHEMA_CHARACTERS = 65_536
ANY_OBJECT = '{"type": "object"}'

# At most one blank or line break between two tokens of JSON: without a bound, a model may write blanks until its limit.
_OPTIONS: Any = {"whitespace_pattern": "[ \\n]?"}
_KEPT_GRAMMARS = 64
_REASON_CHARACTERS = 300
_SCHEMA = "sampling.json_schema"
_ANY_ARGUMENTS = {"type": "object"}
# Keywords with which an object may have properties that it does not list.
_OPENING = ("additionalProperties", "patternProperties", "unevaluatedProperties")
# Keywords that say what an object is. Beside each other, each says a part of it.
_SAYING = ("properties", "anyOf", "oneOf", "$ref", "if", "dependentSchemas")
# Keywords whose values are schemas by name, and those whose values are no schemas.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LITERAL = ("const", "enum", "default", "examples", "required")


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled schema, for any number of answers. matcher: at the beginning of an answer."""

    matcher: LLMatcher = field(repr=False)


class Grammars:
    """Compiles schemas for one tokenizer.

    vocab_size: columns of the model's logits, of which those without a token are never allowed.
    eos_ids: tokens that may end a complete document. form: of tool calls; None: no answer calls tools.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_ids: Sequence[int], form: CallForm | None = None) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._form = form
        self._compiled = lru_cache(_KEPT_GRAMMARS)(self._compile)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Made for the first schema: it takes a second for a large vocabulary."""
        text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
        return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_ids or None)

    def compile(
        self,
        schema: str | None,
        use: ToolUse | None = None,
        thought: Thought | None = None,
        max_thinking_tokens: int | None = None,
        rules: tuple[str, ...] = (),
    ) -> Grammar:
        """The grammar of an answer that is a document of a schema, or calls tools, after its thought.

        rules: of a document instead of a schema, in llguidance's Lark. max_thinking_tokens: of the thought; None: any
        number. May take some milliseconds. Raises InvalidRequest, with the place, for a schema that cannot be held.
        """
        return self._compiled(schema, use, thought, max_thinking_tokens, rules)

    def _compile(
        self,
        schema: str | None,
        use: ToolUse | None,
        thought: Thought | None,
        max_thinking_tokens: int | None,
        rules: tuple[str, ...],
    ) -> Grammar:
        if schema is not None:
            answer = self._checked(schema, _SCHEMA)
            if use is None and thought is None:
                return self._matching(LLMatcher.grammar_from_json_schema(answer, overrides=_OPTIONS), _SCHEMA)
            rules = (f"document: %json {json.dumps(answer | {'x-guidance': _OPTIONS})}",)
        calls = None
        if use:
            assert self._form
            calls = self._form, use, [self._arguments(tool) | {"x-guidance": _OPTIONS} for tool in use.tools]
        text = grammar_of(rules, calls, (thought, max_thinking_tokens) if thought else None, self._mark)
        return self._matching(LLMatcher.grammar_from_lark(text), "prompt.tools" if use else _SCHEMA)

    def _mark(self, text: str) -> str:
        """`Mark`: tokens such as `<tool_call>` are no text to llguidance, whatever the tokenizer says."""
        ids = self._tokenizer.tokenize_str(text, parse_special=True) if text else []
        is_token = len(ids) == 1 and self._tokenizer.is_special_token(ids[0])
        return f"<[{ids[0]}]>" if is_token else literal(text)

    def _matching(self, grammar: str, name: str) -> Grammar:
        """Raises InvalidRequest for a grammar that is too large as a whole."""
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise InvalidRequest(f"cannot be held: {_reason(matcher.get_error())}", field=name)
        return Grammar(matcher)

    def _arguments(self, tool: Tool) -> dict[str, Any]:
        """The schema of a tool's arguments, which are an object whatever else it says."""
        if not tool.parameters:
            return _ANY_ARGUMENTS
        name = f"prompt.tools[{tool.place}].parameters"
        schema = self._checked(tool.parameters, name)
        kinds = schema.get("type", "object")
        if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
            raise InvalidRequest(f"must be object, got {kinds}", field=f"{name}.type")
        return schema | _ANY_ARGUMENTS

    def _checked(self, schema: str, name: str) -> dict[str, Any]:
        """A schema that can be held. Raises InvalidRequest for any other."""
        try:
            parsed = json.loads(schema)
            closed: dict[str, Any] = _closed(parsed)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"is not JSON: {error}", field=name) from None
        if not isinstance(parsed, dict):
            raise InvalidRequest(field=name, limit="an object", value=schema)
        wrong = self._wrong(closed)
        if wrong:
            place = self._place(closed, wrong)
            raise InvalidRequest(f"cannot be held at {place or 'its root'}: {wrong}", field=name)
        return closed

    def _wrong(self, schema: dict[str, Any]) -> str:
        """Why a schema cannot be held; "" if it can."""
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        except ValueError as error:  # such as an integer of more than 64 bits
            return _reason(str(error))
        is_error, told = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        return _reason(told[0]) if is_error else ""

    def _place(self, schema: Any, wrong: str) -> str:
        """The JSON pointer of the innermost part that is wrong by itself, for the same reason."""
        for key, part in _parts(schema):
            if isinstance(part, dict) and self._wrong(part) == wrong:
                return f"/{key}{self._place(part, wrong)}"
            if (below := self._place(part, wrong)) and not isinstance(part, str):
                return f"/{key}{below}"
        return ""


def _reason(told: str) -> str:
    return " ".join(told.split())[:_REASON_CHARACTERS]


def _closed(schema: Any) -> Any:
    """The schema, in which objects have only the properties that they list unless it says otherwise.

    JSON Schema says that they may have any others, and a model would invent them until its answer's length is reached.
    Objects that list none, or require others, stay as they are, and so does all of a schema that puts objects together
    from several.
    """
    return schema if _joins(schema) else _with_closed(schema)


def _joins(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return False
    several = schema.get("allOf")
    said = (len(several) if isinstance(several, list) else 0) + sum(key in schema for key in _SAYING)
    return said > 1 or any(_joins(each) for key in schema for each in _schemas(key, schema[key]).values())


def _with_closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    for key, value in schema.items():
        if within := {name: _with_closed(each) for name, each in _schemas(key, value).items()}:
            closed[key] = list(within.values()) if isinstance(value, list) else within if key in _NAMED else within[key]
    listed, needed = schema.get("properties"), schema.get("required") or []
    says_more = any(key in schema for key in _OPENING)
    if (
        isinstance(listed, dict)
        and isinstance(needed, list)
        and set(map(str, needed)) <= listed.keys()
        and not says_more
    ):
        closed["additionalProperties"] = False
    return closed


def _schemas(key: str, value: Any) -> Mapping[object, Any]:
    """The schemas that the value of a keyword holds, by their names or places; by the keyword where it is one."""
    if key in _LITERAL:
        return {}
    if isinstance(value, list):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value if key in _NAMED else {key: value}
    return {}


def _parts(value: Any) -> Iterator[tuple[object, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


class DocumentState:
    """How far one answer has come in its grammar."""

    def __init__(self, begun: Grammar | DocumentState) -> None:
        """begun: the beginning of an answer, or how far one has come."""
        self.matcher: LLMatcher = begun.matcher.deep_copy()

    def copy(self) -> DocumentState:
        return DocumentState(self)

    def allowed(self) -> NDArray[np.uint8]:
        """Which tokens may come next, a bit each, lowest first: uint8 [at least vocab_size / 8].

        Only end tokens once the document is complete.
        """
        return np.frombuffer(self.matcher.compute_bitmask(), np.uint8)

    def allowed_of(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, one after another, it allows."""
        return int(self.matcher.validate_tokens(list(token_ids)))

    def accept_token(self, token_id: int) -> None:
        """Takes a token that is allowed. Raises ValueError for any other."""
        if not self.matcher.consume_token(token_id):
            raise ValueError(f"the grammar does not allow token {token_id}: {self.matcher.get_error()}")


def forbid(scores: Tensor, documents: Mapping[int, DocumentState]) -> None:
    """Sets scores, float32 [B, V], of tokens that the document of a row does not allow to −inf, in place.

    Eight tokens take a byte on the way to the device.
    """
    packed = to_device(np.stack([document.allowed() for document in documents.values()]), scores.device)
    bits = 1 << torch.arange(8, dtype=torch.uint8, device=scores.device)
    forbidden = (packed[:, :, None] & bits).view(len(packed), -1)[:, : scores.shape[-1]] == 0
    at = to_device(np.array(list(documents), np.int64), scores.device)
    scores[at] = scores[at].masked_fill_(forbidden, -torch.inf)
