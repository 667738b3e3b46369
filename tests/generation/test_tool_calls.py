"""Thoughts and tool calls: read from text in whatever pieces it arrives, and held by grammars."""

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
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from gridsieve.common.chat_templates import TemplateSource
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.generation.sampling.answer_reader import MARKS, AnswerReader
from gridsieve.services.generation.sampling.call_forms import FORMS, CallForm, form_of
from gridsieve.services.generation.sampling.detokenizer import load_tokenizer
from gridsieve.services.generation.sampling.structured import DocumentState, Grammar, Grammars, _closed
from gridsieve.services.generation.sampling.thoughts import Thought
from gridsieve.services.generation.sampling.tool_calls import CallDelta, Tool, ToolUse

BEGIN, END = "<tool_call>", "</tool_call>"
KYOTO = BEGIN + '\n{"name": "weather", "arguments": {"city": "Kyoto"}}\n' + END
READ_KYOTO = ("weather", '{"city": "Kyoto"}')
# By what their templates say.
HERMES, TAGS, PAIRS, NAMES, LIST, TOOLCALL = (
    dict(FORMS)[said] for said in ("<tool_call>", "<function=", "<arg_key>", "[ARGS]", "[TOOL_CALLS]", "<TOOLCALL>")
)


def allowed(state: DocumentState) -> NDArray[np.uint8]:
    """1 for each token that may come next, 0 for others."""
    return np.unpackbits(state.allowed(), bitorder="little")


def read(
    pieces: Sequence[str],
    single: bool = False,
    form: CallForm = HERMES,
    called: Sequence[Tool] = (Tool("weather", "", False, 0),),
    thought: Thought | None = None,
    stopped: bool = False,
) -> tuple[str, list[tuple[str, str]], str]:
    """The text, the names and arguments of the calls, and the thought of an answer that arrives in these pieces."""
    reader = AnswerReader(form, ToolUse(tuple(called), single=single), thought)
    said, shown, deltas = "", "", list[CallDelta]()
    for thinks, text, calls in [*map(reader.read, pieces), reader.end(stopped=stopped)]:
        said += thinks
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
    return shown, joined, said


WORDS = [BEGIN, END, "<tool", "_call>", "</", "<", "\n", "  ", "{", "}", "\\", '"', "[", "]", KYOTO, 'x"', "text", "日"]
PARTS = ['{"name": "weather", "arguments": ', '{"a": "', '{"arguments": {}, "name": "n"}', ', "b": 1}}']
PIECES = st.sampled_from([*WORDS, *PARTS, *sorted(MARKS)])
THOUGHTS = [None, Thought(is_open=False), Thought(is_open=True)]


@given(
    answer=st.lists(PIECES, max_size=10).map("".join),
    single=st.booleans(),
    form=st.sampled_from([form for _, form in FORMS]),
    thought=st.sampled_from(THOUGHTS),
    data=st.data(),
)
def test_an_answer_is_read_alike_in_any_pieces(
    answer: str, single: bool, form: CallForm, thought: Thought | None, data: st.DataObject
) -> None:
    places = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    pieces = [answer[begin:end] for begin, end in zip([0, *places], [*places, len(answer)], strict=True)]
    whole, *others = (read(each, single, form, thought=thought, stopped=True) for each in ([answer], pieces, [*answer]))
    assert others == [whole] * 2


@pytest.mark.parametrize(
    ("answer", "text", "calls"),
    [
        ("No tool. < {", "No tool. < {", []),
        ("  \n", "  \n", []),
        (KYOTO, "", [READ_KYOTO]),
        (f"Let me look.\n\n{KYOTO}\n", "Let me look.", [READ_KYOTO]),
        (f"{KYOTO}\n{KYOTO}", "", [READ_KYOTO] * 2),
        (f"{KYOTO.removesuffix(END)}{KYOTO}", "", [READ_KYOTO] * 2),
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
    assert read([*answer]) == read([answer]) == (text, calls, "")


@pytest.mark.parametrize("begin", ["", BEGIN, f'{BEGIN}{{"name": "', KYOTO.removesuffix(END)])
def test_the_cost_of_a_token_does_not_grow_with_the_answer(begin: str) -> None:
    reader = AnswerReader(HERMES, ToolUse(()), Thought(is_open=not begin))
    reader.read(begin)
    began_s = time.process_time()
    for _ in range(16_000):
        reader.read("{ab} \n")
    reader.end(stopped=True)
    # It takes 0.2 s, and many times as long as this where a token is looked at together with all those before it.
    assert time.process_time() - began_s < 2


def test_a_single_call_is_the_first() -> None:
    assert read([*f"So {KYOTO}\n{KYOTO}"], single=True) == ("So", [READ_KYOTO], "")


OF_CITY = {
    "properties": {"city": {"type": "string"}, "days": {"$ref": "#/$defs/d"}, "at": {}, "deep": {"$ref": "#/$defs/e"}},
    "$defs": {"d": {"type": "integer"}, "e": {"anyOf": [*[{"$ref": "#/$defs/e"}] * 50, {"type": ["null", "integer"]}]}},
}
CITY = Tool("weather", json.dumps(OF_CITY), False, 0)
TAGGED = "<tool_call>\n<function=weather>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"
PAIRED = "<tool_call>weather\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"


@pytest.mark.parametrize(
    ("form", "answer", "text", "calls"),
    [
        (TAGS, TAGGED.format("city", "Kyoto"), "", [READ_KYOTO]),
        (
            TAGS,
            f"So\n\n{TAGGED.format('city', '1')}\n{TAGGED.format('days', '1')}",
            "So",
            ['{"city": "1"}', '{"days": 1}'],
        ),
        (TAGS, TAGGED.format("city", '\n<a href="x">\n'), "", ['{"city": "\\n<a href=\\"x\\">\\n"}']),
        (TAGS, TAGGED.format("days", "1.0"), "", ['{"days": 1}']),
        (TAGS, TAGGED.format("deep", "2"), "", ['{"deep": 2}']),
        (TAGS, TAGGED.format("days", "many"), "", ['{"days": "many"}']),
        (TAGS, TAGGED.format("at", '[true, {"a": null}]'), "", ['{"at": [true, {"a": null}]}']),
        (TAGS, TAGGED.format("at", "True"), "", ['{"at": true}']),
        (TAGS, TAGGED.format("at", "NaN"), "", ['{"at": "NaN"}']),
        (TAGS, "<tool_call>\n<function=clock>\n</function>\n</tool_call>", "", [("clock", "{}")]),
        (TAGS, KYOTO, KYOTO, []),
        (PAIRS, PAIRED.format("city", "Kyoto"), "", [READ_KYOTO]),
        (PAIRS, f"{PAIRED.format('city', '1')}\n{PAIRED.format('days', '1')}", "", ['{"city": "1"}', '{"days": 1}']),
        (PAIRS, "<tool_call>clock</tool_call>", "", [("clock", "{}")]),
        (PAIRS, "<tool_call>weather<arg_key>city</arg_key>Kyoto</arg_value></tool_call>", "", [READ_KYOTO]),
        (PAIRS, "Say <tool_call> and so on.\n", "Say <tool_call> and so on.\n", []),
        (NAMES, '[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{"city": "Kyoto"}', "", [READ_KYOTO]),
        (
            NAMES,
            'So [TOOL_CALLS]weather[ARGS]{"city": "Kyoto"}[TOOL_CALLS]clock[ARGS]{}',
            "So",
            [READ_KYOTO, ("clock", "{}")],
        ),
        (
            LIST,
            '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Kyoto"}}, {"name": "clock", "arguments": {}}]',
            "",
            [READ_KYOTO, ("clock", "{}")],
        ),
        (TOOLCALL, '<TOOLCALL>[{"name": "weather", "arguments": {"city": "Kyoto"}}]</TOOLCALL>', "", [READ_KYOTO]),
        (TOOLCALL, "<TOOLCALL>[]</TOOLCALL>.", "<TOOLCALL>[]</TOOLCALL>.", []),
    ],
)
def test_each_form_of_calls_is_read(form: CallForm, answer: str, text: str, calls: list[Any]) -> None:
    expected = [("weather", each) if isinstance(each, str) else each for each in calls]
    assert read([*answer], form=form, called=[CITY]) == (text, expected, "")


# How published templates write calls: those of Qwen3-VL, Qwen3.5, GLM-4.5V, Mistral Small 3.2 and 3.1, and Nemotron v2.
WRITTEN = {
    HERMES: """\
{%- for call in messages[0].tool_calls %}
{%- if not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' }}{{- call.function.name }}{{- '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}""",
    TAGS: """\
{%- for call in messages[0].tool_calls %}
{%- if not loop.first %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' }}
{%- if value is mapping or (value is sequence and value is not string) %}{{- value | tojson | safe }}
{%- else %}{{- value | string }}{%- endif %}
{{- '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}""",
    PAIRS: """\
{%- for call in messages[0].tool_calls %}
{{- '\\n<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments.items() %}
{{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
{{- value | tojson(ensure_ascii=False) if value is not string else value }}{{- '</arg_value>' }}
{%- endfor %}
{{- '\\n</tool_call>' }}
{%- endfor %}""",
    NAMES: """\
{%- for call in messages[0].tool_calls %}
{{- '[TOOL_CALLS]' + call.function.name + '[CALL_ID]123456789[ARGS]' + call.function.arguments | tojson }}
{%- endfor %}""",
    LIST: """\
{{- '[TOOL_CALLS][' }}
{%- for call in messages[0].tool_calls %}
{{- call.function | tojson }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- ']' }}""",
    TOOLCALL: """\
{{- '<TOOLCALL>[' }}
{%- for call in messages[0].tool_calls %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- ']</TOOLCALL>' }}""",
}
WORD = st.text(st.characters(exclude_categories=["Cs"]), max_size=9)
# Arguments by the schema of MANY, whose strings may look like anything else.
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "city": WORD | st.sampled_from(["1", "true", "null", "{}", "<b>", "\n\n", '"', "\\"]),
        "days": st.integers(-(2**40), 2**40),
        "rate": st.floats(allow_nan=False, allow_infinity=False),
        "metric": st.booleans(),
        "none": st.none(),
        "at": st.recursive(st.none() | st.booleans() | st.integers() | WORD, st.lists).filter(
            lambda value: isinstance(value, list)
        ),
        "of": st.dictionaries(WORD, WORD | st.integers()),
    },
)
KINDS = {
    "city": "string",
    "days": "integer",
    "rate": "number",
    "metric": "boolean",
    "none": "null",
    "at": "array",
    "of": "object",
}
MANY = Tool("weather", json.dumps({"properties": {name: {"type": kind} for name, kind in KINDS.items()}}), False, 0)


def written(form: CallForm, calls: Sequence[dict[str, Any]]) -> str:
    """The turn in which transformers writes these calls of the tool MANY."""
    functions = [{"function": {"name": "weather", "arguments": each}} for each in calls]
    turn = {"role": "assistant", "content": "", "tool_calls": functions}
    return str(render_jinja_template([[turn]], chat_template=WRITTEN[form])[0][0])


@pytest.mark.parametrize("form", WRITTEN, ids=lambda each: getattr(each, "begin", each))
@settings(max_examples=20)
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3), data=st.data())
def test_what_a_template_writes_of_calls_is_read_as_these_calls(
    form: CallForm, calls: list[dict[str, Any]], data: st.DataObject
) -> None:
    answer = written(form, calls)
    place = data.draw(st.integers(0, len(answer)))
    text, found, _ = read([answer[:place], answer[place:]], form=form, called=[MANY], stopped=True)
    assert (text, [json.loads(arguments) for _, arguments in found]) == ("", calls)


def test_ids_are_such_as_the_template_takes() -> None:
    reader = AnswerReader(LIST, ToolUse(()), None)
    (call,) = reader.read('[TOOL_CALLS][{"name": "a", "arguments": {}}]').calls
    assert len(call.id) == 9
    assert call.id.isalnum()


@pytest.mark.parametrize("form", [TAGS, PAIRS, NAMES])
def test_the_text_of_an_argument_is_told_as_it_arrives(form: CallForm) -> None:
    begin = {TAGS: "<tool_call>\n<function=weather>\n<parameter=city>\n", NAMES: '[TOOL_CALLS]weather[ARGS]{"city": "'}
    reader = AnswerReader(form, ToolUse((CITY,)), None)
    reader.read(begin.get(form, "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>"))
    assert ["".join(call.arguments for call in reader.read(each).calls) for each in ("Kyo", "to")] == ["Kyo", "to"]


@pytest.mark.parametrize(
    ("is_open", "answer", "thought", "text"),
    [
        (True, "\nKyoto?\n</think>\n\nIt rains.\n", "Kyoto?", "It rains.\n"),
        (True, "Kyoto? \n", "Kyoto?", ""),
        (True, "", "", ""),
        (True, "Ky\ufffd</think>It", "Ky", "It"),
        (True, "</think>\n\n<think>It</think>", "", "<think>It</think>"),
        (False, "\n<think>Kyoto?</think>It rains.", "Kyoto?", "It rains."),
        (False, "\nIt <think>rains</think>", "", "\nIt <think>rains</think>"),
        (False, " <thin", "", " <thin"),
    ],
)
def test_a_thought_is_apart_from_the_text(is_open: bool, answer: str, thought: str, text: str) -> None:
    for pieces in ([*answer], [answer]):
        assert read(pieces, thought=Thought(is_open)) == (text, [], thought)


@pytest.mark.parametrize("after", ["", "\nSo.\n</think>\n\nText"])
def test_a_call_in_a_thought_that_the_model_did_not_close_is_a_call(after: str) -> None:
    text, calls, thought = read([*f"Hm <tool_cal\n{KYOTO}{after}"], thought=Thought(is_open=True))
    assert (text, calls) == ("Text" * bool(after), [READ_KYOTO])
    assert thought == "Hm <tool_cal" + "\nSo." * bool(after)


@pytest.mark.parametrize(
    ("form", "begun"),
    [(PAIRS, "<tool_call>"), (HERMES, '<tool_call>{"name": "a" '), (HERMES, "<tool_call>{a}"), (NAMES, "[TOOL_CALLS]")],
)
def test_a_thought_that_speaks_of_calls_ends_as_others(form: CallForm, begun: str) -> None:
    answer = f"Not with {begun}</think>\n\nIt rains."
    assert read([*answer], form=form, thought=Thought(is_open=True)) == ("It rains.", [], f"Not with {begun}".strip())


@pytest.mark.parametrize("form", [HERMES, TAGS, PAIRS])
def test_a_call_that_an_end_token_cuts_off_is_text_and_no_reason_to_run_tools(form: CallForm) -> None:
    cut = {HERMES: KYOTO[:-20], TAGS: TAGGED.format("city", "Kyo")[:-40]}.get(form, PAIRED.format("city", "Kyo")[:-20])
    text, calls, _ = read([*f"So {cut}"], form=form, stopped=True)
    assert text == f"So{cut}"
    assert [name for name, _ in calls] == ["weather"]
    reader = AnswerReader(form, ToolUse((CITY,)), None)
    reader.read(cut)
    reader.end(stopped=True)
    assert not reader.has_whole_calls


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


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ('say <tool_call>\n{"name": …}\n</tool_call>', HERMES),
        ("say <tool_call>\n<function=name>\n<parameter=city>\n", TAGS),
        ("say <tool_call>{name}\n<arg_key>{key}</arg_key>", PAIRS),
        ("[TOOL_CALLS]{{ name }}[CALL_ID]{{ id }}[ARGS]", NAMES),
        ('[TOOL_CALLS][{"name": ', LIST),
        ('<TOOLCALL>[{"name": ', TOOLCALL),
        ("say <function=name>{…}</function>", None),
        ("say nothing", None),
    ],
)
def test_a_template_tells_its_form(text: str, form: CallForm | None) -> None:
    assert form_of([TemplateSource(text, takes_parts=True)]) == form
