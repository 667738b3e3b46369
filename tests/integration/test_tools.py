"""Tools through three processes: a model of a known script calls them, and grammars hold the calls of any model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from gridsieve import GridsieveClient, Message, Text, Tool, ToolCall
from gridsieve.client.answer import Answer, FinishReason
from gridsieve.client.prompt import Options
from gridsieve.common.contract.errors import InvalidRequest
from tests.integration.fleet import Stack
from tests.scripted import LOOK, SCRIPT

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = Tool("weather", "The weather of a city.", CITY)
CLOCK = Tool("clock")
CALLS = [("weather", {"city": "Kyoto"}), ("clock", {})]
QUESTION = "Is it raining in Kyoto?"


@pytest.fixture
async def client(scripted: Stack) -> AsyncIterator[GridsieveClient]:
    async with GridsieveClient(scripted.address) as connected:
        yield connected


def read(calls: tuple[ToolCall, ...]) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in calls]


async def test_tools_that_must_not_be_called_are_not_shown_and_calls_are_text(client: GridsieveClient) -> None:
    bare = await client.ask(None, QUESTION)
    none = await client.ask(None, QUESTION, tools=[WEATHER], tool_choice="none")
    shown = await client.ask(None, QUESTION, tools=[WEATHER])
    assert none.text == bare.text == "".join(SCRIPT)
    assert (none.tool_calls, none.reason) == ((), FinishReason.STOP)
    assert none.usage.prompt_tokens == bare.usage.prompt_tokens < shown.usage.prompt_tokens


async def test_an_answer_that_is_cut_off_has_the_beginning_of_its_call(client: GridsieveClient) -> None:
    answer = await client.ask(None, QUESTION, tools=[WEATHER], max_new_tokens=4)
    assert answer.reason is FinishReason.LENGTH
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [("weather", '{"city": "K')]


async def test_a_strict_tool_is_called_freely_and_as_its_schema_says(client: GridsieveClient) -> None:
    """The script's city is not in the schema."""
    oslo = Tool("weather", None, {"type": "object", "properties": {"city": {"const": "Oslo"}}, "required": ["city"]})
    answer = await client.ask(
        None, QUESTION, tools=[replace(oslo, strict=True)], parallel_tool_calls=False, max_new_tokens=100
    )
    assert (answer.text, read(answer.tool_calls)) == (LOOK, [("weather", {"city": "Oslo"})])
    free: Answer = await client.ask(None, QUESTION, tools=[oslo])
    assert read(free.tool_calls) == CALLS


USER = Message("user", (Text(QUESTION),))


@pytest.mark.parametrize(
    ("messages", "options", "why"),
    [
        ([USER], Options(tools=[CLOCK], tool_choice=WEATHER), r"tool_choice\.name must be one of .*, got 'weather'"),
        ([USER], Options(tools=[CLOCK, CLOCK]), r"prompt\.tools\[1\]\.name must be unique, clock is"),
        ([USER], Options(tools=[Tool("a b")]), r"prompt\.tools\[0\]\.name must be .*, got 'a b'"),
        (
            [USER],
            Options(tools=[CLOCK, Tool("weather", None, {"type": "array"})], tool_choice=Tool("weather")),
            r"prompt\.tools\[1\]\.parameters\.type must be object, got array",
        ),
        ([USER], Options(template_options={"colour": 1}), r"prompt\.template_options\.colour is not a variable"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
async def test_what_cannot_be_done_is_refused_by_name(
    client: GridsieveClient, messages: list[Message], options: Options, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        await client.answer(messages, options)
