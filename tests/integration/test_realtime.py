"""GET /v1/realtime: OpenAI's client gets what gRPC's Live call tells, in events of OpenAI's types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from inspect import isclass
from types import NoneType
from typing import Any, cast, get_args, get_origin

import pytest
from openai.types.realtime import (
    ConversationItemCreateEvent,
    RealtimeClientEvent,
    RealtimeSessionCreateRequest,
    ResponseCreateEvent,
)
from openai.types.realtime.realtime_conversation_item_user_message import Content
from openai.types.realtime.realtime_conversation_item_user_message import (
    RealtimeConversationItemUserMessage as UserItem,
)
from pydantic import BaseModel

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.services.gateway.realtime.request import REFUSED, parse
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.generation_pb2 import Sampling
from tests.integration.fleet import Stack, until
from tests.integration.gateway import Gateway
from tests.integration.live import PICTURES, QUESTION, SECOND, watching
from tests.integration.realtime import (
    WATCHING,
    asked,
    image,
    made,
    talking,
    updated,
    words,
)


@pytest.fixture(scope="module")
def door(live_door: Gateway) -> Gateway:
    return live_door


async def test_it_answers_as_by_grpc(door: Gateway, live_stack: Stack) -> None:
    """A question that stays, one that does not, and one after more frames."""
    greedy = Sampling(max_new_tokens=6, temperature=0)
    async with watching(live_stack.address, messages=[system("Be brief.")]) as live:
        expected = []
        for first, end, question, transient in ((0, 4, QUESTION, False), (4, 6, SECOND, True), (6, 8, SECOND, False)):
            await live.show(PICTURES[first:end], [place / 2 for place in range(first, end)])
            before = len(live.seen)
            await live.ask(question, greedy, transient=transient)
            expected.append("".join(each.delta.delta.text for each in live.seen[before:]))
        usage = live.seen[-1].finished.finished.usage
        slices = [list(each.slice.grid.ListFields()) for each in live.seen if each.HasField("slice")]
    async with talking(door, WATCHING | {"instructions": "Be brief."}) as talk:
        await talk.show(0, 4)
        await talk.send(words(QUESTION))
        first = await talk.answer(metadata={"number": "1"})
        begun = len(talk.seen)
        await talk.show(4, 6)
        second = await talk.answer(instructions=SECOND, conversation="none")
        await talk.show(6, 8)
        third = await talk.answer(instructions=SECOND)
    answers = [first, second, third]
    assert [each["output"][0]["content"][0]["text"] for each in answers] == expected
    assert talk.text() == "".join(expected)
    assert first["metadata"] == {"number": "1"}
    assert [each["conversation_id"] is None for each in answers] == [False, True, False]
    assert third["usage"]["input_tokens"] == usage.prompt_tokens
    assert third["usage"]["input_token_details"]["cached_tokens"] == usage.cached_prompt_tokens
    assert third["usage"]["output_tokens"] == usage.completion_tokens
    assert third["usage"]["gridsieve"]["session"]["used_frames"] == 8
    told = [each for each in talk.seen if each["type"] == "gridsieve.slice"]
    assert len(told) == len(slices) == 4
    assert [(each["first_time_s"], each["last_time_s"]) for each in told] == [(0, 0.5), (1, 1.5), (2, 2.5), (3, 3.5)]
    assert all(each["kept"] == list(range(each["grid"]["h"] * each["grid"]["w"])) for each in told)
    kinds = [each["type"] for each in talk.seen[:begun] if each["type"].startswith(("response.", "conversation."))]
    deltas = kinds.count("response.output_text.delta")
    assert kinds[10:] == [
        "response.created",
        "response.output_item.added",
        "conversation.item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "conversation.item.done",
        "response.done",
    ]
    usages = [each["usage"] for each in answers]
    asked = sum(each["input_tokens"] - each["input_token_details"]["cached_tokens"] for each in usages)
    prompt_tokens = asked + sum(len(each["kept"]) for each in told)
    counted = {"prompt_tokens": prompt_tokens, "completion_tokens": sum(each["output_tokens"] for each in usages)}

    def is_counted(log: str) -> bool:
        ended = [json.loads(line) for line in log.splitlines() if '"request ended"' in line]
        return any(each.items() >= counted.items() for each in ended)

    await until(lambda: is_counted(door.log.read_text()))
    await until(lambda: is_counted(live_stack.log("generation")))


def system(text: str) -> prompt_pb2.Message:
    return prompt_pb2.Message(role=prompt_pb2.ROLE_SYSTEM, parts=[prompt_pb2.Part(text=text)])


async def test_a_cancelled_response_ends_and_the_session_goes_on(door: Gateway) -> None:
    async with talking(door, WATCHING | {"max_output_tokens": None}) as talk:
        await talk.show(0, 2)
        for _ in range(2):
            await talk.by.response.create(response={"instructions": "Go on and on."})
        await talk.until("response.created")
        await talk.until("response.created")
        await talk.by.response.cancel()
        for _ in range(2):
            response = (await talk.until("response.done"))["response"]
            # A model of random weights may end the first one by itself.
            assert response["status"] in ("cancelled", "completed", "incomplete")
        assert response["status"] == "cancelled"
        assert response["status_details"] == {"type": "cancelled", "reason": "client_cancelled"}
        await talk.by.response.cancel(event_id="late")
        error = (await talk.until("error"))["error"]
        assert (error["event_id"], error["param"]) == ("late", "response_id")
        assert (await talk.answer(instructions=SECOND))["status"] in ("completed", "incomplete")
        added = [each for each in talk.seen if each["type"] == "conversation.item.added"]
        before = [None, *(each["item"]["id"] for each in added[:-1])]
        assert [each["previous_item_id"] for each in added] == before


OF_TURNS = "session.audio.input.turn_detection"
OF_TRIGGER = "session.gridsieve.triggers[0]"
WRONG: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"type": "input_audio_buffer.append", "audio": "AAAA"}, "input_audio_buffer.append", "audio"),
    ({"type": "conversation.item.delete", "item_id": "1"}, "conversation.item.delete", "stays until it is evicted"),
    ({"type": "session.dance"}, "type", "must be one of session.update"),
    (updated(output_modalities=["audio"]), "session.output_modalities[0]", "'text'"),
    (updated(audio={"output": {"voice": "alloy"}}), "session.audio.output.voice", "must not be set"),
    (updated(audio={"input": {"turn_detection": {"type": "server_vad"}}}), OF_TURNS, "must not be set"),
    (updated(voice="alloy"), "session.voice", "not a field"),
    (updated(gridsieve={"window": 1}), "session.gridsieve.window", "not a field"),
    (updated(gridsieve={"window_tokens": 4}), "session.gridsieve.window_tokens", "at least 16"),
    (updated(gridsieve={"pruning": {"method": "evs", "rate": 0.5}}), "session.gridsieve.pruning", "evs_causal"),
    (updated(gridsieve={"triggers": [{"response": {}}]}), f"{OF_TRIGGER}.response.instructions", "set"),
    (updated(max_output_tokens=0), "session.max_output_tokens", "1"),
    (updated(temperature=101), "session.temperature", "100"),
    (updated(model="other"), "session.model", "must stay"),
    (made({"type": "input_audio", "audio": "AAAA"}), "item.content[0].type", "input_text, input_image"),
    (made({"type": "input_image", "image_url": "https://example.org/a.png"}), "item.content[0].image_url", "data:"),
    (made(words("?")) | {"previous_item_id": "other"}, "previous_item_id", "must be unset, or root"),
    (asked(), "response.instructions", "input_text"),
    (asked(instructions="?", input=[]), "response.input", "must not be set"),
    (asked(instructions="?", max_output_tokens=0), "response.max_output_tokens", "at least 1"),
    (asked(instructions="word " * 500), "", "exceed answer_tokens 128"),
)  # fmt: skip


async def test_an_error_is_about_one_event_and_the_session_goes_on(door: Gateway) -> None:
    async with talking(door) as talk:
        for number, (event, param, message) in enumerate(WRONG):
            await talk.by.send_raw(json.dumps({**event, "event_id": f"mine_{number}"}))
            error = (await talk.until("error"))["error"]
            told = (error["type"], error["event_id"], error["param"] or "")
            assert told == ("invalid_request_error", f"mine_{number}", param), error
            assert message in error["message"]
        refused = [each["response"] for each in talk.seen if each["type"] == "response.created"]
        while len(ends := [each for each in talk.seen if each["type"] == "response.done"]) < len(refused):
            await talk.until("response.done")
        assert {each["response"]["status"] for each in ends} == {"failed"}
        await talk.by.send_raw("[")
        assert "not valid JSON" in (await talk.until("error"))["error"]["message"]
        await talk.show(0, 2)
        for event, param in (
            (made(image(2, time_s=0.1)), "item.content[0].time_s"),
            (updated(instructions="Be brief."), "session.instructions"),
            (updated(gridsieve={"fps": 1}), "session.gridsieve"),
        ):
            await talk.by.send_raw(json.dumps(event))
            assert (await talk.until("error"))["error"]["param"] == param
        broken, empty = (image(2) | {"image_url": f"data:image/png;base64,{data}"} for data in ("AAAA", ""))
        for frames, wrong, field in (
            ({1: image(2), 1.5: broken}, 1.5, "image_url"),  # preprocessing finds out
            ({2: broken, 2.5: image(2)}, 2, "image_url"),
            ({3: empty}, 3, "image_url"),
            ({1e6: image(2)}, 1e6, "time_s"),
        ):
            for time_s, frame in frames.items():
                event = made(words("What"), frame | {"time_s": time_s})
                await talk.by.send_raw(json.dumps({**event, "event_id": f"at {time_s}"}))
            error = (await talk.until("error"))["error"]
            assert (error["event_id"], error["param"]) == (f"at {wrong}", f"item.content[1].{field}")
            assert error["message"].startswith(error["param"])
            dropped = await talk.until("gridsieve.dropped")
            assert (dropped["frames"], dropped["reason"]) == (len(frames), "refused")
        await talk.by.session.update(session={"type": "realtime", "max_output_tokens": 2})
        assert (await talk.until("session.updated"))["session"]["gridsieve"]["window_tokens"] == 512
        response = await talk.answer(instructions=QUESTION)
        assert 1 <= response["usage"]["output_tokens"] <= 2


# Of OpenAI's types, what an object without fields switches on: null alone is neutral.
SWITCHES = ("noise_reduction", "transcription")
PCM = {"format": {"type": "audio/pcm", "rate": 24000}}
# Defaults that the types do not tell. Source: OpenAI's API reference, "realtime client events".
OF_SESSIONS: tuple[dict[str, Any], ...] = (
    {"audio": {"input": PCM, "output": PCM | {"speed": 1.0}}},
    {"max_output_tokens": "inf"},
    {"output_modalities": ["text"]},  # ours
    {"parallel_tool_calls": True},
    {"tool_choice": "auto"},
    {"truncation": "auto"},
)
OF_RESPONSES = (*OF_SESSIONS[1:5], {"conversation": "auto"}, {"audio": {"output": PCM}})
OF_ITEMS = ({"status": "completed"}, {"object": "realtime.item"})


def neutral(kind: type[BaseModel]) -> Iterator[dict[str, Any]]:
    """Each field that an object of this type may lack, with each value that says nothing, in an object of its own."""
    for name, field in kind.model_fields.items():
        if field.is_required():
            continue
        yield {name: None}
        kinds = [each for each in get_args(field.annotation) if each is not NoneType]
        for each in kinds:
            if get_origin(each) in (list, dict):
                yield {name: get_origin(each)()}
        if len(kinds) == 1 and may_be_empty(kinds[0]) and name not in SWITCHES:
            yield from ({name: inner} for inner in ({}, *neutral(kinds[0])))


def may_be_empty(kind: Any) -> bool:
    fields = kind.model_fields.values() if isclass(kind) and issubclass(kind, BaseModel) else ()
    return bool(fields) and not any(field.is_required() for field in fields)


async def test_every_field_of_openais_schema_is_taken_at_its_neutral_value(door: Gateway) -> None:
    events = get_args(get_args(RealtimeClientEvent)[0])
    served = ["session.update", "conversation.item.create", "response.create", "response.cancel"]
    assert {get_args(each.model_fields["type"].annotation)[0] for each in events} == {*served, *REFUSED}
    async with talking(door) as talk:

        async def taken(event: dict[str, Any], kind: str) -> dict[str, Any]:
            await talk.by.send_raw(json.dumps(event))
            while (told := json.loads(await asyncio.wait_for(talk.by.recv_bytes(), 20)))["type"] != kind:
                assert told["type"] != "error", (event, told)
            return cast("dict[str, Any]", told)

        created = talk.seen[0]["session"]
        echoed = [created, *({name: value} for name, value in created.items())]
        for fields in (*neutral(RealtimeSessionCreateRequest), *OF_SESSIONS, *echoed):
            session = WATCHING | {"instructions": "Be brief."} | fields
            told = (await taken(updated(**session), "session.updated"))["session"]
            assert told["instructions"] == (session["instructions"] or "")
        await taken(updated(**WATCHING | {"max_output_tokens": 1}), "session.updated")
        last, texts, frames = None, made(words("?")), made(image(0, time_s=0))
        parts = [{name: None} for name in Content.model_fields if name != "type"] + [{"detail": "auto"}]
        for event in (
            *(texts | fields for fields in ({"previous_item_id": "root"}, *neutral(ConversationItemCreateEvent))),
            *(texts | {"item": texts["item"] | fields} for fields in (*neutral(UserItem), *OF_ITEMS)),
            *(made(words("?") | fields) for fields in parts if "text" not in fields),
            *(made(frames["item"]["content"][0] | fields) for fields in parts if "image_url" not in fields),
        ):
            told = await taken({"previous_item_id": last} | event, "conversation.item.done")
            last = told["item"]["id"]
        for fields in (*neutral(ResponseCreateEvent), *({"response": fields} for fields in OF_RESPONSES)):
            if fields != {"response": {"input": []}}:  # a context of its own
                await taken(texts, "conversation.item.done")
                await taken({"type": "response.create"} | fields, "response.done")
        event, _ = parse(b'{"type": "response.cancel", "response_id": null, "event_id": null}')
        assert not isinstance(event, InvalidRequest)
