"""Grammars hold answers to tools, documents and thoughts."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.generation.sampling.answer_reader import MARKS
from gridsieve.services.generation.sampling.call_forms import CallForm
from gridsieve.services.generation.sampling.detokenizer import load_tokenizer
from gridsieve.services.generation.sampling.structured import DocumentState, Grammar, Grammars, _closed
from gridsieve.services.generation.sampling.thoughts import Thought
from gridsieve.services.generation.sampling.tool_calls import Tool, ToolUse
from tests.generation.tool_calls import (
    BEGIN,
    END,
    HERMES,
    LIST,
    MANY,
    NAMES,
    PAIRS,
    TAGS,
    TOOLCALL,
    WRITTEN,
    read,
    written,
)


def allowed(state: DocumentState) -> NDArray[np.uint8]:
    """1 for each token that may come next, 0 for others."""
    return np.unpackbits(state.allowed(), bitorder="little")


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 3},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
        "enum": {"enum": [f"{END}", "}", None]},
        "code": {"type": "string", "pattern": "^[a-c]{2}/$"},
    },
    "required": ["city", "enum", "code"],
    "$defs": {"day": {"type": "integer", "minimum": 0, "maximum": 31}},
}
CLOCK = {"properties": {"utc": {"type": "boolean"}}, "required": ["utc"]}
TEXT = {"type": "string"}
ANSWER = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}


def tools(*, strict: bool) -> tuple[Tool, ...]:
    schemas = {"weather": json.dumps(WEATHER), "clock": json.dumps(CLOCK), "nothing": '{"properties": {}}'}
    return tuple(Tool(name, text, strict, place) for place, (name, text) in enumerate(schemas.items()))


SCHEMAS: dict[str, Any] = {
    "weather": WEATHER | {"additionalProperties": False},
    "clock": CLOCK | {"type": "object", "additionalProperties": False},
    "nothing": {"type": "object", "additionalProperties": False},
}
# By name: what may be called, the schema of another answer, and how the answer begins.
USES: dict[str, tuple[ToolUse, dict[str, Any] | None, str]] = {
    "required": (ToolUse(tools(strict=False), required=True), None, ""),
    "a single one": (ToolUse(tools(strict=False), required=True, single=True), None, ""),
    "named": (ToolUse(tools(strict=False)[1:2], required=True), None, ""),
    "strict": (ToolUse(tools(strict=True)), None, "So <tool_cal: \n<tool_call>"),
    "strict from the beginning": (ToolUse(tools(strict=True), single=True), None, "<tool_call>"),
    "document": (ToolUse(tools(strict=False)), ANSWER, "{"),
    "no document": (ToolUse(tools(strict=False)), ANSWER, BEGIN),
}
# Marks that are tokens of published tokenizers, and whether these call them special.
TOKENS = dict.fromkeys((BEGIN, END, "<think>", "</think>", *PAIRS.marks), False)
TOKENS |= dict.fromkeys(("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), True)


@pytest.fixture(scope="module")
def folders(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Folders of tokenizers that spell marks in several tokens, and that have them as tokens."""
    tokenizer = Tokenizer.from_file(str(tiny_checkpoint / "tokenizer.json"))
    for mark, special in TOKENS.items():
        added = AddedToken(mark, normalized=False, special=special)
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)([added])
    folder = tmp_path_factory.mktemp("tokens")
    tokenizer.save(str(folder / "tokenizer.json"))
    return {False: tiny_checkpoint, True: folder}


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Any:
    return load_tokenizer(tiny_checkpoint)


@pytest.fixture(scope="module")
def eos_id(tokenizer: Any) -> int:
    return int(tokenizer.token_to_id("<|im_end|>"))


@pytest.fixture(scope="module")
def grammars(tiny_checkpoint: Path, tokenizer: Any, eos_id: int) -> Grammars:
    return Grammars(tiny_checkpoint, tokenizer.get_vocab_size(), [eos_id], HERMES)


def walk(grammar: Grammar, tokenizer: Any, eos_id: int, begin: str, seed: int) -> str:
    """An answer that a grammar allows, drawn at random after its beginning."""
    state, drawn = DocumentState(grammar), random.Random(seed)
    ids: list[int] = tokenizer.encode(begin, add_special_tokens=False).ids
    for each in ids:
        assert allowed(state)[each]
        state.accept_token(each)
    while not ids or ids[-1] != eos_id:
        assert len(ids) < 3000
        ids.append(drawn.choice([*map(int, allowed(state).nonzero()[0])]))
        state.accept_token(ids[-1])
    return str(tokenizer.decode(ids[:-1]))


CASES = [(HERMES, name) for name in USES]
CASES += [(form, name) for form in (TAGS, PAIRS, NAMES, LIST, TOOLCALL) for name in ("required", "strict")]


@pytest.mark.parametrize("marks_are_tokens", [False, True])
@pytest.mark.parametrize(("form", "name"), CASES, ids=lambda each: getattr(each, "begin", each))
@pytest.mark.parametrize("seed", range(2))
def test_any_answer_that_a_grammar_allows_calls_tools_as_their_schemas_say(
    folders: dict[bool, Path], eos_id: int, form: CallForm, name: str, marks_are_tokens: bool, seed: int
) -> None:
    folder = folders[marks_are_tokens]
    tokenizer: Any = load_tokenizer(folder, MARKS)
    use, other, begin = USES[name]
    begin = begin.replace(BEGIN, form.begin)
    grammars = Grammars(folder, tokenizer.get_vocab_size(), [eos_id], form)
    answer = walk(grammars.compile(json.dumps(other) if other else None, use), tokenizer, eos_id, begin, seed)
    text, calls, _ = read([*answer], use.single, form, use.tools)
    if name == "document":
        assert not calls
        jsonschema.validate(json.loads(text), ANSWER | {"additionalProperties": False})
        return
    assert text == begin.removesuffix(form.begin).rstrip() * name.startswith("strict")
    assert len(calls) == 1 if use.single else calls
    for called, arguments in calls:
        assert called in {tool.name for tool in use.tools}
        jsonschema.validate(json.loads(arguments), SCHEMAS[called])


@pytest.mark.parametrize("form", WRITTEN, ids=lambda each: getattr(each, "begin", each))
def test_a_grammar_allows_what_the_template_writes(folders: dict[bool, Path], eos_id: int, form: CallForm) -> None:
    answer = written(form, [{"city": "Kyoto", "days": 3, "of": {"a": [None]}}, {}])
    answer = answer.lstrip().replace("[CALL_ID]123456789", "")
    tokenizer: Any = load_tokenizer(folders[True], MARKS)
    grammars = Grammars(folders[True], tokenizer.get_vocab_size(), [eos_id], form)
    state = DocumentState(grammars.compile(None, ToolUse((MANY,), required=True)))
    for each in tokenizer.encode(answer, add_special_tokens=False).ids:
        assert allowed(state)[each]
        state.accept_token(each)
    assert allowed(state)[eos_id]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("name", ["document", "required"])
def test_a_grammar_begins_after_a_thought_of_at_most_its_budget(
    folders: dict[bool, Path], eos_id: int, is_open: bool, name: str
) -> None:
    tokenizer: Any = load_tokenizer(folders[True], MARKS)
    grammars = Grammars(folders[True], tokenizer.get_vocab_size(), [eos_id], HERMES)
    use, other, _ = USES[name]
    begin = "" if is_open else "<think>"
    for budget in (0, 3):
        grammar = grammars.compile(
            json.dumps(other) if other else None, use if use.required else None, Thought(is_open), budget
        )
        answer = walk(grammar, tokenizer, eos_id, begin, budget)
        thought, _, _ = answer.removeprefix("<think>").partition("</think>")
        # Tokens drawn at random may be parts of characters.
        assert len(thought) <= budget * max(map(len, tokenizer.get_vocab()))
        text, calls, said = read([*answer], called=use.tools, thought=Thought(is_open))
        assert said == thought.strip(" \r\n\t\ufffd")
        if other is None:
            assert calls
        else:
            jsonschema.validate(json.loads(text), ANSWER)
        assert budget or not thought


@pytest.mark.parametrize("marks_are_tokens", [False, True])
@pytest.mark.parametrize("begin", ["Hm.</think>", "<think>Hm.</think>\n\n", ""])
def test_a_document_follows_a_thought_of_any_length(
    folders: dict[bool, Path], eos_id: int, marks_are_tokens: bool, begin: str
) -> None:
    tokenizer: Any = load_tokenizer(folders[marks_are_tokens], MARKS)
    grammars = Grammars(folders[marks_are_tokens], tokenizer.get_vocab_size(), [eos_id])
    thought = Thought(is_open=begin.startswith("Hm"))
    answer = walk(grammars.compile(json.dumps(ANSWER), None, thought), tokenizer, eos_id, begin or "{", 0)
    text, _, said = read([*answer], thought=thought)
    assert said == ("Hm." if begin else "")
    jsonschema.validate(json.loads(text), ANSWER)


@pytest.mark.parametrize("is_open", [False, True])
def test_free_text_follows_a_thought_of_at_most_its_budget(
    folders: dict[bool, Path], eos_id: int, is_open: bool
) -> None:
    tokenizer: Any = load_tokenizer(folders[True], MARKS)
    grammars = Grammars(folders[True], tokenizer.get_vocab_size(), [eos_id], HERMES)
    state = DocumentState(grammars.compile(None, None, Thought(is_open), 3))
    for each in ("a", "b", "c") if is_open else ("<think>", "a", "b", "c"):
        assert allowed(state)[tokenizer.token_to_id(each)]
        state.accept_token(tokenizer.token_to_id(each))
    assert [*allowed(state).nonzero()[0]] == [tokenizer.token_to_id("</think>")]
    state.accept_token(tokenizer.token_to_id("</think>"))
    assert allowed(state)[: tokenizer.get_vocab_size()].all()


def test_an_answer_with_a_budget_may_be_without_a_thought(folders: dict[bool, Path], eos_id: int) -> None:
    tokenizer: Any = load_tokenizer(folders[True], MARKS)
    grammars = Grammars(folders[True], tokenizer.get_vocab_size(), [eos_id], HERMES)
    state = DocumentState(grammars.compile(None, None, Thought(is_open=False), 3))
    state.accept_token(tokenizer.token_to_id("a"))
    free = allowed(state)[: tokenizer.get_vocab_size()]
    assert [*(free == 0).nonzero()[0]] == [tokenizer.token_to_id("<think>")]


SET: dict[str, Any] = {
    "$ref": "#/$defs/set",
    "$defs": {
        "set": {
            "type": "object",
            "properties": {
                "unit": {"allOf": [{"$ref": "#/$defs/unit"}], "default": "c"},
                "range": {
                    "type": "object",
                    "properties": {"least": {"type": "integer"}, "most": {"type": "integer"}},
                    "anyOf": [{"required": ["least"]}, {"required": ["most"]}],
                },
            },
            "required": ["unit", "range"],
            "additionalProperties": {"$ref": "#/$defs/few"},
        },
        "unit": {"type": "string", "enum": ["c", "1"]},
        "few": {"enum": [1, 2]},
    },
}


@pytest.mark.parametrize("form", [TAGS, PAIRS], ids=["tags", "pairs"])
@pytest.mark.parametrize("seed", range(4))
def test_raw_arguments_satisfy_schemas_with_references_and_other_properties(
    folders: dict[bool, Path], eos_id: int, form: CallForm, seed: int
) -> None:
    tokenizer: Any = load_tokenizer(folders[True], MARKS)
    grammars = Grammars(folders[True], tokenizer.get_vocab_size(), [eos_id], form)
    use = ToolUse((Tool("set", json.dumps(SET), False, 0),), required=True, single=True)
    answer = walk(grammars.compile(None, use), tokenizer, eos_id, "", seed)
    _, [(_, arguments)], _ = read([*answer], form=form, called=use.tools)
    jsonschema.validate(json.loads(arguments), SET)


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"minProperties": 1}, "parameters cannot be held at its root: .* no minProperties of an object"),
        ({"properties": {"a": {"allOf": [TEXT, TEXT]}}}, r"parameters\.properties\.a cannot be held: allOf of a text"),
        ({"properties": {"a": {"enum": ["</arg_value>"]}}}, r"\.a cannot be held: it allows no value"),
        ({"properties": {"a": {"$ref": "#/$defs/b~1c"}}, "$defs": {"b/c": TEXT}}, r"\.a cannot be held: \$ref of a"),
    ],
)
def test_a_schema_that_the_form_cannot_hold_is_refused(
    folders: dict[bool, Path], eos_id: int, schema: dict[str, Any], why: str
) -> None:
    grammars = Grammars(folders[True], 600, [eos_id], PAIRS)
    with pytest.raises(InvalidRequest, match=why):
        grammars.compile(None, ToolUse((Tool("set", json.dumps(schema), False, 0),), required=True))


def test_text_that_calls_nothing_may_follow_a_strict_tool(grammars: Grammars, tokenizer: Any, eos_id: int) -> None:
    state = DocumentState(grammars.compile(None, ToolUse(tools(strict=True))))
    assert not allowed(state)[eos_id]
    for each in tokenizer.encode("It <tool rains.", add_special_tokens=False).ids:
        state.accept_token(each)
    assert allowed(state)[eos_id]


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ("{", "is not JSON"),
        ('{"type": "string"}', r"\.type must be object, got string"),
        ('{"properties": {"a": {"type": "hexagon"}}}', " cannot be held at /properties/a"),
    ],
)
def test_a_schema_that_cannot_be_held_is_named_by_its_place_in_the_prompt(
    grammars: Grammars, parameters: str, why: str
) -> None:
    use = ToolUse((Tool("clock", parameters, False, 7),), required=True)
    with pytest.raises(InvalidRequest, match=rf"^prompt\.tools\[7\]\.parameters ?{why}"):
        grammars.compile(None, use)


CLOSED = {"additionalProperties": False}
OF_A = {"type": "object", "properties": {"a": TEXT}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OF_A, OF_A | CLOSED),
        ({"type": "object"}, {"type": "object"}),
        (OF_A | {"required": ["a", "b"]}, OF_A | {"required": ["a", "b"]}),
        (OF_A | {"additionalProperties": TEXT}, OF_A | {"additionalProperties": TEXT}),
        (OF_A | {"patternProperties": {"^b": TEXT}}, OF_A | {"patternProperties": {"^b": TEXT}}),
        ({"items": OF_A}, {"items": OF_A | CLOSED}),
        ({"prefixItems": [OF_A, TEXT]}, {"prefixItems": [OF_A | CLOSED, TEXT]}),
        ({"properties": {"properties": OF_A}}, {"properties": {"properties": OF_A | CLOSED}} | CLOSED),
        (
            {"properties": {"enum": OF_A, "anyOf": OF_A, "allOf": TEXT}},
            {"properties": {"enum": OF_A | CLOSED, "anyOf": OF_A | CLOSED, "allOf": TEXT}} | CLOSED,
        ),
        ({"enum": [OF_A], "default": OF_A}, {"enum": [OF_A], "default": OF_A}),
        ({"$ref": "#/$defs/it", "$defs": {"it": OF_A}}, {"$ref": "#/$defs/it", "$defs": {"it": OF_A | CLOSED}}),
        ({"anyOf": [OF_A, {"type": "null"}]}, {"anyOf": [OF_A | CLOSED, {"type": "null"}]}),
        ({"allOf": [OF_A]}, {"allOf": [OF_A | CLOSED]}),
    ],
)
def test_an_object_has_only_the_properties_that_it_lists(schema: Any, expected: Any) -> None:
    assert _closed(schema) == expected


JOINED: list[dict[str, Any]] = [
    {"allOf": [OF_A, {"properties": {"b": TEXT}}]},
    OF_A | {"allOf": [{"properties": {"b": TEXT}, "required": ["b"]}]},
    OF_A | {"anyOf": [{"properties": {"b": TEXT}, "required": ["b"]}]},
    OF_A | {"$ref": "#/items/$defs/b", "$defs": {"b": {"properties": {"b": TEXT}, "required": ["b"]}}},
]


@pytest.mark.parametrize("schema", JOINED)
def test_a_schema_that_puts_an_object_together_from_several_allows_all_their_properties(
    grammars: Grammars, tokenizer: Any, eos_id: int, schema: dict[str, Any]
) -> None:
    state = DocumentState(grammars.compile(json.dumps({"items": {"type": "object"} | schema, "type": "array"})))
    for each in tokenizer.encode('[{"a":"x","b":"y"}]', add_special_tokens=False).ids:
        assert allowed(state)[each]
        state.accept_token(each)
    assert allowed(state)[eos_id]
