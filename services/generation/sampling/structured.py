"""Structured output: which tokens may come next, so that an answer is a JSON document of its schema.

llguidance computes the masks: a wheel of three megabytes without dependencies, where xgrammar's needs Triton. This
module knows neither requests nor the model.
Source: the documentation of llguidance, "JSON schema".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from common.contract.errors import InvalidRequest

MAX_SCHEMA_CHARACTERS = 65_536
ANY_OBJECT = '{"type": "object"}'

# At most one blank or line break between two tokens of JSON: without a bound, a model may write blanks until its limit.
_OPTIONS: Any = {"whitespace_pattern": "[ \\n]?"}
_KEPT_GRAMMARS = 64
_REASON_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled schema, for any number of answers."""

    tokenizer: LLTokenizer = field(repr=False)
    text: str = field(repr=False)


class Grammars:
    """Compiles schemas for one tokenizer.

    vocab_size: columns of the model's logits, of which those without a token are never allowed.
    eos_ids: tokens that may end a complete document.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._compiled = lru_cache(_KEPT_GRAMMARS)(self._compile)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """Made for the first schema: it takes a second for a large vocabulary."""
        text = (self._folder / "tokenizer.json").read_text(encoding="utf-8")
        return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_ids or None)

    def compile(self, schema: str) -> Grammar:
        """May take some milliseconds. Raises InvalidRequest, with the place, for a schema that cannot be held."""
        return self._compiled(schema)

    def _compile(self, schema: str) -> Grammar:
        try:
            parsed = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"sampling.json_schema is not JSON: {error}") from None
        if not isinstance(parsed, dict):
            raise InvalidRequest(f"sampling.json_schema must be an object, got {schema[:80]}")
        wrong = self._wrong(parsed)
        if wrong:
            place = self._place(parsed, wrong)
            raise InvalidRequest(f"sampling.json_schema cannot be held at {place or 'its root'}: {wrong}")
        return Grammar(self._tokenizer, LLMatcher.grammar_from_json_schema(parsed, overrides=_OPTIONS))

    def _wrong(self, schema: dict[str, Any]) -> str:
        """Why a schema cannot be held; "" if it can."""
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        except ValueError as error:  # such as an integer of more than 64 bits
            return str(error)[:_REASON_CHARACTERS]
        is_error, told = LLMatcher.validate_grammar_with_warnings(grammar, self._tokenizer)
        return " ".join(told[0].split())[:_REASON_CHARACTERS] if is_error else ""

    def _place(self, schema: Any, wrong: str) -> str:
        """The JSON pointer of the innermost part that is wrong by itself, for the same reason."""
        for key, part in _parts(schema):
            if isinstance(part, dict) and self._wrong(part) == wrong:
                return f"/{key}{self._place(part, wrong)}"
            if (below := self._place(part, wrong)) and not isinstance(part, str):
                return f"/{key}{below}"
        return ""


def _parts(value: Any) -> Iterator[tuple[object, Any]]:
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)


class DocumentState:
    """How far one answer has come in its grammar."""

    def __init__(self, grammar: Grammar) -> None:
        self._matcher = LLMatcher(grammar.tokenizer, grammar.text, log_level=0)
        self._size = grammar.tokenizer.vocab_size

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next: bool [vocab_size]. Only end tokens once the document is complete."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        return np.unpackbits(bits, count=self._size, bitorder="little").astype(np.bool_)

    def add(self, token_id: int) -> None:
        """Takes a token that is allowed. Raises ValueError for any other."""
        if not self._matcher.consume_token(token_id):
            raise ValueError(f"the grammar does not allow token {token_id}: {self._matcher.get_error()}")
