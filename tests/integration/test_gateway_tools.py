"""Tools over HTTP, by OpenAI's client and a model of a known script; requests as clients send them by default."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests import media
from tests.integration.gateway import Gateway, data_url
from tests.scripted import LOOK

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
ASKED: Any = {"role": "user", "content": "Is it raining in Kyoto?"}
CALLS = [("weather", '{"city": "Kyoto"}'), ("clock", "{}")]
SENT: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "client_requests.json").read_text())
"""Bodies that clients sent by default, each with a field or a value that no other has. Texts and schemas are ours."""
MEDIA = {"CLIP": data_url("video/mp4", media.clip(8, fps=4)), "PICTURE": data_url("image/png", media.picture(64, 48))}


@pytest.fixture(scope="module")
def door(scripted_door: Gateway) -> Gateway:
    return scripted_door


@pytest.fixture
def client(door: Gateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="unused", max_retries=0) as connected:
        yield connected


@pytest.fixture
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_a_call_is_made_and_its_result_answered(client: openai.OpenAI, model: str) -> None:
    ask = client.chat.completions.create
    [choice] = ask(model=model, messages=[ASKED], tools=[WEATHER, CLOCK]).choices
    calls = choice.message.tool_calls or []
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", LOOK)
    assert [(call.function.name, call.function.arguments) for call in calls if call.type == "function"] == CALLS
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": '{"rain": true}'} for call in calls]
    for turn in (choice.message, choice.message.model_dump() | {"content": None}):
        earlier: Any = [ASKED, turn, *results]
        answer = ask(model=model, messages=earlier, tools=[WEATHER, CLOCK], tool_choice="none")
        assert answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "stop"


def test_a_stream_has_the_calls_in_pieces(client: openai.OpenAI, model: str) -> None:
    with client.chat.completions.stream(model=model, messages=[ASKED], tools=[WEATHER, CLOCK], n=2) as stream:
        deltas = [event.chunk.choices[0] for event in stream if event.type == "chunk" and event.chunk.choices]
        whole = stream.get_final_completion()
    for choice in whole.choices:
        assert choice.finish_reason == "tool_calls"
        assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []] == CALLS
        assert choice.message.content == LOOK
        own = [call for delta in deltas if delta.index == choice.index for call in delta.delta.tool_calls or []]
        assert [bool(call.id) for call in own if call.index == 0] == [True] + [False] * (
            sum(not c.index for c in own) - 1
        )
    assert len({call.id for choice in whole.choices for call in choice.message.tool_calls or []}) == 4
    for delta in deltas:  # some clients read the first part of a call alone
        parts = [call.index for call in delta.delta.tool_calls or []]
        assert parts == sorted(set(parts))


def test_a_demanded_call_is_that_call(client: openai.OpenAI, model: str) -> None:
    lamp: Any = {"type": "function", "function": {"name": "lamp", "parameters": {"enum": [{}], "type": "object"}}}
    choice: Any = {"type": "function", "function": {"name": "lamp"}}
    answer = client.chat.completions.create(
        model=model, messages=[ASKED], tools=[WEATHER, lamp], tool_choice=choice, parallel_tool_calls=False
    )
    message = answer.choices[0].message
    assert message.content is None
    assert [call.function.name for call in message.tool_calls or [] if call.type == "function"] == ["lamp"]


@pytest.mark.parametrize("name", SENT)
def test_what_clients_send_by_default_is_answered(door: Gateway, name: str) -> None:
    few = {} if "max_completion_tokens" in SENT[name] else {"max_tokens": 16}
    text = json.dumps(SENT[name] | few)
    for mark, url in MEDIA.items():
        text = text.replace(f'"{mark}"', json.dumps(url))
    with door.http() as http:
        answer = http.post("/v1/chat/completions", content=text)
    assert answer.status_code == httpx.codes.OK, answer.text
    assert "error" not in answer.text
