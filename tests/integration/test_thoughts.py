"""Thoughts over HTTP, by OpenAI's client and a model of a known script, which thinks and then calls a tool in tags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from openai.types.responses import ResponseReasoningItem

from gridsieve.client.client import GridsieveClient
from tests.integration.fleet import Stack, running
from tests.integration.gateway import Gateway, gateway
from tests.scripted import TEMPLATE, write_scripted

# As Qwen3.5: the prompt opens the thought, and marks are tokens.
LOOK = "Let me look."
CALL = ("<tool_call>", "\n<function=weather>\n<parameter=city>\n", "Kyo", "to", "\n</parameter>\n</function>\n")
SCRIPT = ("Rain", " or", " sun?\n", "</think>", f"\n\n{LOOK}\n", *CALL, "</tool_call>")
THINKS = (
    TEMPLATE.replace('<tool_call>{"name": "…", "arguments": {}}</tool_call>', "<tool_call><function=…></tool_call>")
    .replace("{% if turn.role == 'tool' %}", "{{ turn.reasoning_content }}{% if turn.role == 'tool' %}", 1)
    .replace(
        "{{ 'assistant\\n' }}",
        "{{ 'assistant\\n<think>\\n' ~ ('' if enable_thinking is undefined else '\\n</think>\\n\\n') }}",
    )
)
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 5}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
ASKED: Any = {"role": "user", "content": "Is it raining in Kyoto?"}
RAIN = {"type": "object", "properties": {"rain": {"type": "boolean"}}, "required": ["rain"]}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(write_scripted(tmp_path_factory.mktemp("thinks"), SCRIPT, THINKS)) as stack:
        yield stack


@pytest.fixture(scope="module")
def door(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(stack.address, tmp_path_factory.mktemp("door")) as door:
        yield door


@pytest.fixture(scope="module")
def client(door: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="unused", max_retries=0) as connected:
        yield connected


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def ask(client: openai.OpenAI, model: str, *messages: Any, **options: Any) -> Any:
    options = {"tools": [WEATHER], "max_tokens": 60} | options
    return client.chat.completions.create(model=model, messages=[*(messages or (ASKED,))], **options)


def test_thought_text_and_call_are_apart(client: openai.OpenAI, model: str) -> None:
    [choice] = ask(client, model).choices
    assert (choice.message.reasoning_content, choice.message.content) == ("Rain or sun?", LOOK)
    assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
        ("weather", '{"city": "Kyoto"}')
    ]
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("stop", [[], ["never"]])
def test_the_tokens_of_the_thought_are_counted(client: openai.OpenAI, model: str, stop: list[str]) -> None:
    """Those of the script up to the mark; of two answers those of both."""
    thought = SCRIPT.index("</think>") + 1
    for options, expected in (
        ({}, thought),
        ({"n": 2}, 2 * thought),
        ({"max_tokens": 2}, 2),
        ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, 0),
    ):
        usage = ask(client, model, stop=stop, **options).usage
        assert usage.completion_tokens_details.reasoning_tokens == expected
    assert client.responses.create(model=model, input="Rain?").usage.output_tokens_details.reasoning_tokens == thought


def test_a_stream_has_the_thought_before_the_text(client: openai.OpenAI, model: str) -> None:
    deltas = [chunk.choices[0].delta for chunk in ask(client, model, stream=True)]
    thoughts = [text for each in deltas if (text := getattr(each, "reasoning_content", None))]
    assert "".join(thoughts) == "Rain or sun?"
    assert not any(each.content or each.tool_calls for each in deltas if getattr(each, "reasoning_content", None))
    assert "".join(each.content or "" for each in deltas) == LOOK
    arguments = [call.function.arguments for each in deltas for call in each.tool_calls or []]
    assert "".join(arguments) == '{"city": "Kyoto"}'


@pytest.mark.parametrize("name", ["max_thinking_tokens", "thinking_token_budget"])
def test_a_budget_ends_the_thought_and_the_answer_follows(client: openai.OpenAI, model: str, name: str) -> None:
    for budget, thought in ((2, "Rain or"), (0, None), (100, "Rain or sun?")):
        message = ask(client, model, extra_body={name: budget}).choices[0].message
        assert getattr(message, "reasoning_content", None) == thought
        assert message.content == LOOK
        assert len(message.tool_calls) == 1
    with pytest.raises(openai.BadRequestError, match=f"{name} must be at least 0, got -1"):
        ask(client, model, extra_body={name: -1})


def test_a_schema_holds_after_the_thought(client: openai.OpenAI, model: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "rain", "schema": RAIN}}
    message = ask(client, model, tools=openai.NOT_GIVEN, response_format=form).choices[0].message
    assert message.reasoning_content == "Rain or sun?"
    jsonschema.validate(json.loads(message.content), RAIN)


def test_a_demanded_call_follows_the_thought(client: openai.OpenAI, model: str) -> None:
    message = ask(client, model, tool_choice="required", parallel_tool_calls=False).choices[0].message
    assert (message.reasoning_content, message.content) == ("Rain or sun?", None)
    [call] = message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), CITY)


def test_a_call_that_the_end_cuts_off_is_text(client: openai.OpenAI, model: str) -> None:
    [choice] = ask(client, model, stop=["to\n</par"]).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == f"{LOOK}<tool_call>\n<function=weather>\n<parameter=city>\nKyo"


def test_without_thinking_all_is_text(client: openai.OpenAI, model: str) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    [choice] = ask(client, model, tool_choice="none", extra_body=off).choices
    assert choice.message.content == "".join(SCRIPT)
    assert not hasattr(choice.message, "reasoning_content")


def test_the_template_gets_the_thought_of_an_earlier_turn(client: openai.OpenAI, model: str) -> None:
    said = {"role": "assistant", "content": "It rains."}
    lengths = [
        ask(client, model, ASKED, said | more, ASKED, max_tokens=1).usage.prompt_tokens
        for more in ({}, {"reasoning_content": "rain" * 20}, {"reasoning": "rain" * 20}, {"reasoning": None})
    ]
    assert lengths[0] == lengths[3] < lengths[1] == lengths[2]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.reasoning_content must not be set: the role"):
        ask(client, model, ASKED | {"reasoning_content": "x"})


TOOL: Any = {"type": "function", "name": "weather", "parameters": CITY, "strict": False}


def test_responses_have_a_reasoning_item_that_goes_on_with_the_conversation(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input="Rain?", tools=[TOOL]) as stream:
        events = list(stream)
    first = stream.get_final_response()
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call"]
    told = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(told) == "Rain or sun?"
    thought, message, call = (item.model_dump(exclude_none=True) for item in first.output)
    assert thought["content"] == [{"type": "reasoning_text", "text": "Rain or sun?"}]
    assert message["content"][0]["text"] == LOOK
    assert json.loads(call["arguments"]) == {"city": "Kyoto"}
    result: Any = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    told_again: list[Any] = [{"role": "user", "content": "Rain?"}, thought, message, call, result]
    ids = [{"type": "item_reference", "id": item["id"]} for item in (thought, message)]  # as the AI SDK
    referred: list[Any] = [told_again[0], *ids, call, result]
    lengths = [
        client.responses.create(model=model, tools=[TOOL], max_output_tokens=16, **each).usage.input_tokens  # type: ignore[union-attr]
        for each in (
            {"input": [result], "previous_response_id": first.id},
            {"input": told_again},
            {"input": referred},
            {"input": [item for item in told_again if item.get("type") != "reasoning"]},
            {"input": [*told_again[:2], call, message, result]},  # a model may call first
        )
    ]
    assert lengths[3] < lengths[0] == lengths[1] == lengths[2] <= lengths[4]


def test_a_thought_is_told_as_a_summary_where_one_is_asked_for(client: openai.OpenAI, model: str) -> None:
    with client.responses.stream(model=model, input="Rain?", reasoning={"summary": "auto"}) as stream:
        told = [event for event in stream if "reasoning" in event.type]
    assert {event.type.removeprefix("response.reasoning_summary_") for event in told[1:-2]} == {"text.delta"}
    assert [event.type.removeprefix("response.reasoning_summary_") for event in (told[0], *told[-2:])] == [
        *("part.added", "text.done", "part.done")
    ]
    thought = stream.get_final_response().output[0]
    assert isinstance(thought, ResponseReasoningItem)
    assert [part.text for part in thought.summary] == ["Rain or sun?"]
    assert not thought.content
    lengths = [
        client.responses.create(
            model=model,
            max_output_tokens=16,
            input=[{"role": "user", "content": "Rain?"}, *own, {"role": "assistant", "content": LOOK}],
        ).usage.input_tokens  # type: ignore[union-attr]
        for own in ([thought.model_dump(exclude_none=True)], [])
    ]
    assert lengths[0] > lengths[1]


async def test_in_a_live_session_the_thought_is_apart_and_has_a_limit(stack: Stack) -> None:
    async with GridsieveClient(stack.address) as client, client.live() as session:
        for limit, thought in ((None, "Rain or sun?"), (2, "Rain or")):
            answer = await session.answer("Rain?", max_thinking_tokens=limit, max_new_tokens=60)
            assert (answer.thought, answer.text[: len(LOOK)]) == (thought, LOOK)
            assert answer.usage.thought_tokens == len(thought.split()) + 1
        answer = await session.answer("Rain?", json_schema=RAIN, max_new_tokens=60)
        assert answer.thought == "Rain or sun?"
        jsonschema.validate(json.loads(answer.text), RAIN)


async def test_realtime_tells_the_thought_beside_the_text(door: Gateway) -> None:
    texts, thoughts, responses = "", "", set()
    client = openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="unused")
    async with client, client.realtime.connect() as connection:
        await connection.response.create(response={"instructions": "Rain?", "max_output_tokens": 60})
        async for event in connection:
            told: Any = event
            if told.type == "gridsieve.thought":
                thoughts += told.delta
                responses.add(told.response_id)
            elif told.type == "response.output_text.delta":
                texts += told.delta
            elif told.type == "response.done":
                break
    assert (thoughts, texts[: len(LOOK)], responses) == ("Rain or sun?", LOOK, {told.response.id})
