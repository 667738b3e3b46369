"""Tool calls: read from text in whatever pieces it arrives, and held by a grammar to the schemas of their arguments."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from gridsieve.common.chat_templates import TemplateSource
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.generation.sampling.detokenizer import load_tokenizer
from gridsieve.services.generation.sampling.structured import DocumentState, Grammars, _closed
from gridsieve.services.generation.sampling.tool_calls import CallDelta, CallReader, Tool, ToolUse, writes_calls

BEGIN, END = "<tool_call>", "</tool_call>"
KYOTO = BEGIN + '\n{"name": "weather", "arguments": {"city": "Kyoto"}}\n' + END
READ_KYOTO = ("weather", '{"city": "Kyoto"}')


def allowed(state: DocumentState) -> NDArray[np.uint8]:
    """1 for each token that may come next, 0 for others."""
    return np.unpackbits(state.allowed(), bitorder="little")


def read(pieces: Sequence[str], single: bool = False) -> tuple[str, list[tuple[str, str]]]:
    """The text, and the names and arguments of the calls, of an answer that arrives in these pieces."""
    reader = CallReader(single)
    shown, deltas = "", list[CallDelta]()
    for text, calls in [*map(reader.read, pieces), reader.end()]:
        shown += text
        deltas += calls
    first = {delta.index: delta for delta in reversed(deltas)}
    assert [*first] == [*range(len(first))][::-1]
    assert all(delta.id and delta.name for delta in first.values())
    assert len({delta.id for delta in first.values()}) == len(first)
    assert all(not (delta.id or delta.name) for delta in deltas if delta is not first[delta.index])
    joined = [
        (first[index].name, "".join(each.arguments for each in deltas if each.index == index))
        for index in range(len(first))
    ]
    return shown, joined


WORDS = [BEGIN, END, "<tool", "_call>", "</", "<", "\n", "  ", "{", "}", "\\", '"', "[", "]", KYOTO, 'x"', "text", "日"]
PARTS = ['{"name": "weather", "arguments": ', '{"a": "', '{"arguments": {}, "name": "n"}', ', "b": 1}}']
PIECES = st.sampled_from([*WORDS, *PARTS])


@given(answer=st.lists(PIECES, max_size=10).map("".join), single=st.booleans(), data=st.data())
def test_an_answer_is_read_alike_in_any_pieces(answer: str, single: bool, data: st.DataObject) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    pieces = [answer[begin:end] for begin, end in zip([0, *places], [*places, len(answer)], strict=True)]
    assert read(pieces, single) == read([answer], single) == read([*answer], single)


@pytest.mark.parametrize(
    ("answer", "text", "calls"),
    [
        ("No tool. < {", "No tool. < {", []),
        ("  \n", "  \n", []),
        (KYOTO, "", [READ_KYOTO]),
        (f"Let me look.\n\n{KYOTO}\n", "Let me look.", [READ_KYOTO]),
        (f"{KYOTO}\n{KYOTO}", "", [READ_KYOTO] * 2),
        (f"{KYOTO}\nSo. \n", "\nSo. \n", [READ_KYOTO]),
        (f'{BEGIN}{{"name":"a","parameters":{{}}}}{END}', "", [("a", "{}")]),
        (f'{BEGIN}{{"arguments": {{"é": [1.5]}}, "name": "a"}}{END}', "", [("a", '{"é": [1.5]}')]),
        (f'{BEGIN}{{"name": "a", "arguments": "{{\\"b\\": 1}}"}}{END}', "", [("a", '{"b": 1}')]),
        (f'{BEGIN}{{"name": "a", "arguments": ""}}{END}', "", [("a", "{}")]),
        (f'{BEGIN}{{"name": "a", "arguments": null}}{END}', "", [("a", "{}")]),
        (f'{BEGIN}{{"name": "a"}}{END}', "", [("a", "{}")]),
        (
            f'{BEGIN}{{"name": "a", "arguments": {{"b": "}}]{END}\\"{{"}}}}{END}',
            "",
            [("a", f'{{"b": "}}]{END}\\"{{"}}')],
        ),
        (f'{BEGIN}{{"name": "\\u00e9\\ud83c", "arguments": {{}}}}{END}', "", [("é?", "{}")]),
        (f"So \n{BEGIN}\n{{name: a}}\n{END}.", f"So \n{BEGIN}\n{{name: a}}\n{END}.", []),
        (
            f'{BEGIN}{{"name": "a", "arguments": "Kyoto"}}{END}',
            f'{BEGIN}{{"name": "a", "arguments": "Kyoto"}}{END}',
            [],
        ),
        (f'{BEGIN}{{"name": "a", "arguments": [1]}}{END}', f'{BEGIN}{{"name": "a", "arguments": [1]}}{END}', []),
        (f"{BEGIN}[1]{END}", f"{BEGIN}[1]{END}", []),
        (f"{BEGIN}{END}{KYOTO}", f"{BEGIN}{END}", [READ_KYOTO]),
        (f'Wait \n{BEGIN}\n{{"name": "wea', f'Wait \n{BEGIN}\n{{"name": "wea', []),
        (KYOTO[: -len('to"}}\n' + END)], "", [("weather", '{"city": "Kyo')]),
        (KYOTO[: -len("\n" + END)], "", [READ_KYOTO]),
        ("Wait <tool_cal", "Wait <tool_cal", []),
    ],
)
def test_what_is_a_call_and_what_is_text(answer: str, text: str, calls: list[tuple[str, str]]) -> None:
    assert read([*answer]) == read([answer]) == (text, calls)


@pytest.mark.parametrize("begin", ["", BEGIN, f'{BEGIN}{{"name": "', KYOTO.removesuffix(END)])
def test_the_cost_of_a_token_does_not_grow_with_the_answer(begin: str) -> None:
    reader = CallReader()
    reader.read(begin)
    began_s = time.process_time()
    for _ in range(16_000):
        reader.read("{ab} \n")
    reader.end()
    # It takes 0.2 s, and many times as long as this where a token is looked at together with all those before it.
    assert time.process_time() - began_s < 2


def test_a_single_call_is_the_first() -> None:
    assert read([*f"So {KYOTO}\n{KYOTO}"], single=True) == ("So", [READ_KYOTO])


WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 3},
        "days": {"type": "array", "items": {"$ref": "#/$defs/day"}, "maxItems": 2},
        "enum": {"enum": [f"{END}", "}", None]},
    },
    "required": ["city", "enum"],
    "$defs": {"day": {"type": "integer", "minimum": 0, "maximum": 31}},
}
CLOCK = {"properties": {"utc": {"type": "boolean"}}, "required": ["utc"]}
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
    "no document": (ToolUse(tools(strict=False)), ANSWER, "<tool"),
}


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Any:
    return load_tokenizer(tiny_checkpoint)


@pytest.fixture(scope="module")
def eos_id(tokenizer: Any) -> int:
    return int(tokenizer.token_to_id("<|im_end|>"))


@pytest.fixture(scope="module")
def grammars(tiny_checkpoint: Path, tokenizer: Any, eos_id: int) -> Grammars:
    return Grammars(tiny_checkpoint, tokenizer.get_vocab_size(), [eos_id])


@pytest.mark.parametrize("name", USES)
@pytest.mark.parametrize("seed", range(3))
def test_any_answer_that_a_grammar_allows_calls_tools_as_their_schemas_say(
    grammars: Grammars, tokenizer: Any, eos_id: int, name: str, seed: int
) -> None:
    use, other, begin = USES[name]
    state = DocumentState(grammars.compile(other and json.dumps(other), use))
    ids: list[int] = tokenizer.encode(begin, add_special_tokens=False).ids
    for each in ids:
        assert allowed(state)[each]
        state.accept_token(each)
    drawn = random.Random(seed)
    while not ids or ids[-1] != eos_id:
        assert len(ids) < 3000
        ids.append(drawn.choice([*map(int, allowed(state).nonzero()[0])]))
        state.accept_token(ids[-1])
    answer = tokenizer.decode(ids[:-1])
    text, calls = read([*answer], use.single)
    if name == "document":
        assert not calls
        jsonschema.validate(json.loads(text), ANSWER | {"additionalProperties": False})
        return
    assert text == begin.removesuffix("<tool_call>").rstrip() * name.startswith("strict")
    assert len(calls) == 1 if use.single else calls
    for called, arguments in calls:
        assert called in {tool.name for tool in use.tools}
        jsonschema.validate(json.loads(arguments), SCHEMAS[called])


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


TEXT, CLOSED = {"type": "string"}, {"additionalProperties": False}
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


@pytest.mark.parametrize(
    ("text", "reads"),
    [
        ('say <tool_call>\n{"name": …}\n</tool_call>', True),
        ("say <tool_call>\n<function=name>\n<parameter=city>\n", False),
        ("say nothing", False),
    ],
)
def test_templates_that_teach_another_form_of_calls_are_told_apart(text: str, reads: bool) -> None:
    assert writes_calls([TemplateSource(text, takes_parts=True)]) == reads
