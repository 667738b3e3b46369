"""Thoughts and tool calls are read from text, in whatever pieces it arrives."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gridsieve.common.chat_templates import TemplateSource
from gridsieve.services.generation.sampling.answer_reader import MARKS, AnswerReader
from gridsieve.services.generation.sampling.call_forms import FORMS, CallForm, form_of
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

KYOTO = BEGIN + '\n{"name": "weather", "arguments": {"city": "Kyoto"}}\n' + END
READ_KYOTO = ("weather", '{"city": "Kyoto"}')
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
