"""POST /v1/responses: OpenAI's client gets what gRPC's gets, in objects and events of OpenAI's types."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal

import grpc
import httpx
import openai
import pytest
from google.protobuf.json_format import MessageToDict
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from gridsieve import GridsieveClient, Image, Message, Pruning, Text, Video
from gridsieve.client.prompt import Options
from gridsieve.v1 import generation_pb2, generation_pb2_grpc
from tests import media
from tests.integration.conftest import SERVED_NAME
from tests.integration.fleet import Stack, metric_in
from tests.integration.gateway import Gateway, data_url, gateway
from tests.scripted import LOOK
from tests.served import served

CLIP, PICTURE = media.clip(8, fps=4), media.picture(60, 90)
CLIP_URL, PICTURE_URL = data_url("video/mp4", CLIP), data_url("image/png", PICTURE)
ASKED = {"temperature": 0, "max_output_tokens": 8}
EVENT = TypeAdapter(ResponseStreamEvent)
WITH_LOGPROBS = {"include": ["message.output_text.logprobs", "reasoning.encrypted_content"]}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def user(*parts: Any) -> Message:
    return Message("user", parts)


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": f"input_{kind}", **fields}


WHY = part("text", text="Why?")
SAME: dict[str, tuple[dict[str, Any], list[Message]]] = {
    "instructions": (
        {"instructions": "Be brief.", "input": "Why?"},
        [Message("system", (Text("Be brief."),)), user(Text("Why?"))],
    ),
    "media": (
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        part("file", file_data=CLIP_URL, filename="clip.mp4", pruning={"rate": 0.5}),
                        part("image", image_url=PICTURE_URL, detail="low"),
                        part("file", file_data=CLIP_URL.partition(",")[2], filename="clip.mp4"),
                        WHY,
                    ],
                }
            ],
            "mm_processor_kwargs": {"num_frames": 4},
        },
        [
            user(
                Video(data=CLIP, num_frames=4, pruning=Pruning(0.5)),
                Image(data=PICTURE),
                Video(data=CLIP, num_frames=4),
                Text("Why?"),
            )
        ],
    ),
    "a video in either field": (
        {
            "input": [
                {
                    "role": "user",
                    "content": [
                        part("video", video_url=CLIP_URL, mm_processor_kwargs={"num_frames": 2}),
                        part("video", input_video={"url": CLIP_URL}, pruning={"rate": 0.5}),
                    ],
                }
            ],
        },
        [user(Video(data=CLIP, num_frames=2), Video(data=CLIP, pruning=Pruning(0.5)))],
    ),
    "earlier turns, as clients echo them": (
        {
            "input": [
                {"type": "message", "role": "developer", "content": [part("text", text="Be brief.")]},
                {"role": "user", "content": [part("image", image_url=CLIP_URL), WHY]},
                {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "A square.", "annotations": [], "logprobs": []}],
                },
                {"role": "user", "content": "Which colour?"},
            ],
            "pruning": {"rate": 0.5},
            "store": False,
            "previous_response_id": None,
            "reasoning": {"effort": "low", "summary": "auto"},
            "text": {"format": {"type": "text"}, "verbosity": "low"},
            "truncation": "disabled",
        },
        [
            Message("system", (Text("Be brief."),)),
            user(Video(data=CLIP, pruning=Pruning(0.5)), Text("Why?")),
            Message("assistant", (Text("A square."),)),
            user(Text("Which colour?")),
        ],
    ),
}


@pytest.mark.parametrize("name", SAME)
async def test_every_item_is_answered_as_by_grpc(stack: Stack, http: httpx.Client, name: str) -> None:
    body, messages = SAME[name]
    answer = await asyncio.to_thread(http.post, "/v1/responses", json=ASKED | WITH_LOGPROBS | body)
    got = answer.raise_for_status().json()
    async with GridsieveClient(stack.address) as client:
        wanted = await client.answer(messages, Options(temperature=0, max_new_tokens=8, logprobs=True))
    Response.model_validate(got)
    (item,) = got["output"]
    (content,) = item["content"]
    assert content["text"] == wanted.text
    assert [each["token"] for each in content["logprobs"]] == [
        wanted.choices[0].token_texts[each] for each in wanted.token_ids
    ]
    assert [each["logprob"] for each in content["logprobs"]] == pytest.approx(wanted.logprobs, abs=1e-5)
    assert (got["status"], item["status"]) == {
        "stop": ("completed", "completed"),
        "length": ("incomplete", "incomplete"),
    }[wanted.reason.value]
    usage, counted = got["usage"], wanted.usage
    assert (usage["input_tokens"], usage["output_tokens"]) == (counted.prompt_tokens, counted.completion_tokens)
    assert usage["total_tokens"] == counted.prompt_tokens + counted.completion_tokens
    assert usage["gridsieve"]["prompt_tokens_full"] == counted.prompt_tokens_full
    assert [each["kept_tokens"] for each in usage["gridsieve"]["media"]] == [each.num_kept for each in counted.media]


def events_in(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each of which is of OpenAI's type for its name and has its number."""
    events = []
    for block in filter(None, text.split("\n\n")):
        if block.startswith(":"):
            continue
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENT.validate_python(events[-1])
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    changing = ("id", "created_at", "completed_at", "usage")
    output = [{name: value for name, value in item.items() if name != "id"} for item in response["output"]]
    return {name: value for name, value in response.items() if name not in changing} | {"output": output}


async def test_a_stream_builds_the_same_response(http: httpx.Client) -> None:
    body = ASKED | {"input": "Why?", "top_logprobs": 2, "metadata": {"run": "7"}, "user": "ann"} | WITH_LOGPROBS
    whole = http.post("/v1/responses", json=body).raise_for_status().json()
    events = events_in(http.post("/v1/responses", json=body | {"stream": True}).raise_for_status().text)
    names = [event["type"].removeprefix("response.") for event in events]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert names == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *["output_text.delta"] * len(deltas),
        *("output_text.done", "content_part.done", "output_item.done", whole["status"]),
    ]
    assert "".join(event["delta"] for event in deltas) == whole["output"][0]["content"][0]["text"]
    assert [each for event in deltas for each in event["logprobs"]] == whole["output"][0]["content"][0]["logprobs"]
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    assert events[0]["response"]["status"] == "in_progress"
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if whole["status"] == "incomplete" else None)
    repeated = {"metadata": {"run": "7"}, "user": "ann", "temperature": 0, "max_output_tokens": 8, "store": True}
    assert whole.items() >= repeated.items()


class Scene(BaseModel):
    colour: Literal["red", "blue"]
    moves: bool


async def test_openai_clients_parse(door: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="unused") as client:
        scene = await client.responses.parse(
            model=SERVED_NAME, input="Which?", text_format=Scene, temperature=0, max_output_tokens=200
        )
    assert isinstance(scene.output_parsed, Scene)
    assert scene.text is not None
    assert scene.text.format is not None
    assert scene.text.format.type == "json_schema"


def with_item(**item: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": "Why?"}, item]}


def with_part(**fields: Any) -> dict[str, Any]:
    return {"instructions": "Be brief.", "input": [{"role": "user", "content": [WHY, fields]}]}


UNHELD = {"type": "object", "properties": {"seen": {"type": "array", "uniqueItems": True}}}
REFUSED = [
    ({"previous_response_id": "resp_1"}, 400, "previous_response_id", "send the items of the conversation in input"),
    ({"conversation": {"id": "conv_1"}}, 400, "conversation", "send previous_response_id"),
    ({"prompt": {"id": "pmpt_1"}}, 400, "prompt", "not kept"),
    ({"store": "always"}, 400, "store", "'always'"),
    ({"background": True}, 400, "background", "the request that asks"),
    ({"include": ["file_search_call.results"]}, 400, "include[0]", "file_search_call.results"),
    ({"tool_choice": {"type": "function", "name": "weather"}}, 400, "tool_choice", "'weather'"),
    ({"truncation": "auto"}, 400, "truncation", "'auto'"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens", "must be"),
    ({"n": 2}, 400, "n", "is not a field"),
    (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": UNHELD}}},
        400,
        "text.format.schema",
        "/properties/seen",
    ),
    ({"text": {"format": {"type": "json_schema", "schema": UNHELD}}}, 400, "text.format.name", "must be set"),
    (with_item(type="item_reference", id="msg_1"), 404, "input[1].id", "send the item itself"),
    (with_item(type="web_search_call"), 400, "input[1].type", "function_call_output"),
    ({"text": {"format": {"type": "moments"}}}, 400, "text.format", "needs a video in the prompt"),
    ({"text": {"format": {"type": "moments", "captions": "vtt"}}}, 400, "text.format.captions", "of one video"),
    (
        {"text": {"format": {"type": "moments"}}, "tools": [WEATHER], "tool_choice": "required"},
        400,
        "text.format",
        "must",
    ),
    (with_item(role="user", content=[{"type": "input_sound"}]), 400, "input[1].content[0].type", "input_file"),
    (with_item(role="user", content=[WHY | {"x": 1}]), 400, "input[1].content[0].x", "is not a field"),
    (with_part(type="input_file"), 400, "input[0].content[1]", "exactly one of"),
    (with_part(type="input_file", file_data=""), 400, "input[0].content[1].file_data", "is empty"),
    (
        with_part(type="input_file", file_data=CLIP_URL, mm_processor_kwargs={"fps": 0.0}),
        400,
        "input[0].content[1].mm_processor_kwargs.fps",
        "must be",
    ),
    (with_part(type="input_video"), 400, "input[0].content[1]", "exactly one of"),
    (with_part(type="input_video", input_video={"url": "a.mp4"}), 400, "input[0].content[1].input_video.url", "start"),
    (with_part(type="input_image", image_url="http://127.0.0.1/a.png"), 403, "input[0].content[1].image_url", "127.0"),
    (with_part(type="input_image", file_id="file-1"), 404, "file_id", "names no file"),
]


@pytest.mark.parametrize(("change", "status", "field", "why"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_named(http: httpx.Client, change: Any, status: int, field: str, why: str) -> None:
    answer = http.post("/v1/responses", json={"input": "Why?", "stream": True} | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, field), error
    assert error["message"].startswith(field)
    assert why in error["message"]


def test_the_old_completions_name_the_path_to_use(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": "Why?"})
    assert answer.status_code == 404
    assert "POST /v1/chat/completions" in answer.json()["error"]["message"]


CALLS = (("call_1", "weather", '{"city":"Kyoto"}'), ("call_2", "weather", '{"city":"Rome"}'))
MOMENT = generation_pb2.Moment(start_s=0.5, end_s=1.5, description="It moves.", last_slice=2, kept=True)
CALLING_MAX_BYTES = 50_000
"""Of one client of `calling`."""


class Played(generation_pb2_grpc.GenerationServiceServicer):
    """Generation that answers with text and two calls, is cut off inside the second, or fails inside the first.

    Asked for moments, it names one. Asked to go on, it says more before the calls until `enough` is set.
    """

    def __init__(self) -> None:
        self.asked = generation_pb2.GenerateRequest()
        self.enough = threading.Event()

    async def ListModels(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield generation_pb2.ListModelsResponse(name="scripted", max_model_len=100)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked = request
        usage = generation_pb2.Usage(prompt_tokens_full=9, prompt_tokens=9, completion_tokens=5)
        told, last = request.prompt.messages[-1].parts[-1].text, generation_pb2.FINISH_REASON_TOOL_CALLS
        yield generation_pb2.GenerateResponse(accepted=generation_pb2.Accepted(request_id="r", usage=usage))
        yield delta(text="Let me ", token_ids=[1])
        yield delta(text="see.", token_ids=[2])
        while told == "go on" and not self.enough.is_set():
            yield delta(text="so ", token_ids=[1])
            await asyncio.sleep(0.02)
        begun = [{"index": index, "id": call_id, "name": name} for index, (call_id, name, _) in enumerate(CALLS)]
        if told == "at once":
            rest = [{"index": index, "arguments": arguments} for index, (_, _, arguments) in enumerate(CALLS)]
            yield delta(tool_calls=begun[:1])
            yield delta(text="And then?", tool_calls=[rest[0], begun[1], rest[1]])
        for index, (_, _, arguments) in enumerate(() if told == "at once" else CALLS):
            yield delta(tool_calls=[begun[index]], token_ids=[3])
            if told == "fail":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "generation is draining")
            for piece in (arguments[:8], arguments[8:]):
                if told == "cut off" and piece == CALLS[1][2][8:]:
                    last = generation_pb2.FINISH_REASON_LENGTH
                else:
                    yield delta(tool_calls=[{"index": index, "arguments": piece}], token_ids=[4])
        moments = [MOMENT] if request.sampling.HasField("moments") else []
        yield generation_pb2.GenerateResponse(
            finished=generation_pb2.Finished(
                reason=last, usage=usage, timings=generation_pb2.Timings(), moments=moments
            )
        )


def delta(**fields: Any) -> Any:
    return generation_pb2.GenerateResponse(delta=generation_pb2.Delta(**fields))


@pytest.fixture(scope="module")
def played() -> Played:
    return Played()


@pytest.fixture(scope="module")
def calling(played: Played, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("scripted")
    register = partial(generation_pb2_grpc.add_GenerationServiceServicer_to_server, played)
    with (
        served(register) as address,
        gateway(address, folder, "--max-bytes-per-client", str(CALLING_MAX_BYTES)) as started,
    ):
        yield started


def call_item(place: int, status: str = "completed") -> dict[str, Any]:
    call_id, name, arguments = CALLS[place]
    arguments = arguments if status == "completed" else arguments[:8]
    return {"type": "function_call", "status": status, "call_id": call_id, "name": name, "arguments": arguments}


@pytest.mark.parametrize("cut_off", [False, True])
def test_function_calls_are_items_after_the_text(calling: Gateway, played: Played, cut_off: bool) -> None:
    body = {"input": "cut off" if cut_off else "Weather?", "tools": [WEATHER | {"strict": None}]}
    with calling.http() as http:
        whole = http.post("/v1/responses", json=body).raise_for_status().json()
        events = events_in(http.post("/v1/responses", json=body | {"stream": True}).raise_for_status().text)
    Response.model_validate(whole)
    content = [{"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}]
    assert without_ids(whole)["output"] == [
        {"type": "message", "status": "completed", "role": "assistant", "content": content},
        call_item(0),
        call_item(1, "incomplete" if cut_off else "completed"),
    ]
    assert whole["status"] == ("incomplete" if cut_off else "completed")
    assert without_ids(events[-1]["response"]) == without_ids(whole)
    with calling.http() as http:
        http.post("/v1/responses", json=body | {"previous_response_id": whole["id"]}).raise_for_status()
    _, answered, _ = played.asked.prompt.messages
    assert [json.loads(call.arguments)["city"] for call in answered.tool_calls] == ["Kyoto", "Rome"][: 2 - cut_off]
    for index, item in enumerate(whole["output"]):
        own = [event for event in events if event.get("output_index") == index]
        assert [event["item"]["status"] for event in (own[0], own[-1])] == ["in_progress", item["status"]]
        assert len({event.get("item_id") or event["item"]["id"] for event in own}) == 1
        if item["type"] == "function_call":
            pieces = [each["delta"] for each in own if each["type"] == "response.function_call_arguments.delta"]
            (done,) = (each for each in own if each["type"] == "response.function_call_arguments.done")
            assert "".join(pieces) == done["arguments"] == item["arguments"]


def test_text_that_arrives_with_the_rest_of_a_call_is_told_after_it(calling: Gateway) -> None:
    body = {"input": "at once", "tools": [WEATHER], "stream": True}
    with calling.http() as http:
        events = events_in(http.post("/v1/responses", json=body).raise_for_status().text)
    first, one, then, other = without_ids(events[-1]["response"])["output"]
    assert [each["content"][0]["text"] for each in (first, then)] == ["Let me see.", "And then?"]
    assert [one, other] == [call_item(0), call_item(1)]


def test_openai_clients_send_the_results_of_calls(calling: Gateway, played: Played) -> None:
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="unused") as client:
        choice = {"type": "function", "name": "weather"}
        with client.responses.stream(
            model="scripted", input="Weather?", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False
        ) as stream:
            first = stream.get_final_response()
        assert MessageToDict(played.asked.tool_choice) == {
            "mode": "TOOL_CHOICE_MODE_REQUIRED",
            "name": "weather",
            "singleCall": True,
        }
        (tool,) = played.asked.prompt.tools
        assert (tool.name, tool.description, tool.strict) == ("weather", WEATHER["description"], False)
        assert json.loads(tool.parameters) == WEATHER["parameters"]
        results = [{"type": "function_call_output", "call_id": call[0], "output": "Rain."} for call in CALLS]
        earlier = [{"role": "user", "content": "Weather?"}, *first.output]
        client.responses.create(model="scripted", input=[*earlier, *results], tools=[WEATHER], tool_choice="none")
    turns = [MessageToDict(each) for each in played.asked.prompt.messages]
    assert turns == [
        {"role": "ROLE_USER", "parts": [{"text": "Weather?"}]},
        {
            "role": "ROLE_ASSISTANT",
            "parts": [{"text": "Let me see."}],
            "toolCalls": [{"id": call[0], "name": call[1], "arguments": call[2]} for call in CALLS],
        },
        *({"role": "ROLE_TOOL", "parts": [{"text": "Rain."}], "toolCallId": call[0]} for call in CALLS),
    ]


def test_a_conversation_goes_on_as_if_all_its_items_were_sent(calling: Gateway, played: Played) -> None:
    """Its media are read as their own request said, and the instructions are those of the last request alone."""
    asked = {"role": "user", "content": [part("video", video_url=CLIP_URL), WHY]}
    reading = {"mm_processor_kwargs": {"num_frames": 4}, "pruning": {"rate": 0.5}}
    results = [{"type": "function_call_output", "call_id": call[0], "output": "Rain."} for call in CALLS]
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="alice") as client:
        ask = partial(client.responses.create, model="scripted", tools=[WEATHER])

        def turns_of(**body: Any) -> list[dict[str, Any]]:
            assert ask(**body).store is (body.get("store") is not False)
            return [MessageToDict(each) for each in played.asked.prompt.messages]

        *_, last = ask(input=[asked], instructions="Be brief.", stream=True, extra_body=reading)
        first = last.response
        assert first.store
        assert client.responses.retrieve(first.id) == first
        second = ask(input=results, previous_response_id=first.id)
        assert (second.previous_response_id, second.store) == (first.id, True)
        then = {"instructions": "Be long.", "input": "And then?", "extra_body": {"pruning": {"rate": 0.25}}}
        by_id = turns_of(previous_response_id=second.id, **then)
        items = [
            {"role": "user", "content": [part("video", video_url=CLIP_URL, **reading), WHY]},
            *first.output,
            *results,
            *second.output,
            {"role": "user", "content": "And then?"},
        ]
        assert by_id == turns_of(**then | {"input": items, "store": False})
        assert [turn["role"].removeprefix("ROLE_").lower() for turn in by_id] == [
            *("system", "user", "assistant", "tool", "tool", "assistant", "user")
        ]
        references = [{"type": "item_reference", "id": each.id} for each in (*first.output, *second.output)]
        by_reference = [items[0], *references[:3], *results, *references[3:], items[-1]]
        assert by_id == turns_of(**then | {"input": by_reference})
        with pytest.raises(openai.BadRequestError, match="another replica") as caught:
            ask(input="?", previous_response_id=first.id, extra_headers={"authorization": "Bearer mallory"})
        assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")
        with pytest.raises(openai.NotFoundError, match="item itself"):
            ask(input=references[:1], extra_headers={"authorization": "Bearer mallory"})
        unstored = ask(input="Hi", store=False)
        assert unstored.store is False
        with pytest.raises(openai.NotFoundError, match=r"store: false"):
            client.responses.retrieve(unstored.id)
        client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError):
            ask(input="?", previous_response_id=second.id)


def test_media_are_pruned_as_their_own_request_said(calling: Gateway, played: Played) -> None:
    clip = part("video", video_url=CLIP_URL)
    with calling.http() as http:

        def prunings(previous: str | None, pruning: Any, own: Any = None) -> tuple[str, list[Any]]:
            """The response's id, and how the videos of the whole conversation are pruned."""
            asked = {
                "input": [{"role": "user", "content": [clip | {"pruning": own}]}],
                "previous_response_id": previous,
            }
            told = http.post("/v1/responses", json=asked | {"pruning": pruning}).raise_for_status().json()
            assert not MessageToDict(played.asked.pruning)
            videos = [each.video for turn in played.asked.prompt.messages for each in turn.parts if each.video.data]
            return told["id"], [MessageToDict(each.pruning) for each in videos]

        first, of_first = prunings(None, None)
        second, of_second = prunings(first, {"method": "random", "seed": 1}, own={"rate": 0.5})
        _, of_all = prunings(second, {"rate": 0.75})
    whole = {"method": "random", "rate": 0.5, "seed": "1"}
    assert (of_first, of_second, of_all) == ([{}], [{}, whole], [{}, whole, {"rate": 0.75}])


def test_a_conversation_that_is_continued_counts_in_the_callers_budget(calling: Gateway) -> None:
    half = "x" * (CALLING_MAX_BYTES // 2)
    with calling.http() as http:
        first = http.post("/v1/responses", json={"input": half}).raise_for_status().json()
        then = {"previous_response_id": first["id"], "input": "Why?"}
        second = http.post("/v1/responses", json=then).raise_for_status().json()
        refused = http.post("/v1/responses", json={"previous_response_id": second["id"], "input": half})
    assert refused.status_code == 400
    assert f"--max-bytes-per-client is {CALLING_MAX_BYTES}" in refused.json()["error"]["message"]


SENT: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "client_requests_of_responses.json").read_text())
"""Bodies that clients sent by default. Texts are ours."""


@pytest.mark.parametrize("name", SENT)
def test_what_clients_send_unasked_is_answered(calling: Gateway, name: str) -> None:
    with calling.http() as http:
        http.post("/v1/responses", json={"model": "scripted"} | SENT[name]).raise_for_status()


def test_a_schema_sent_along_with_a_required_call_is_not_asked_for(calling: Gateway, played: Played) -> None:
    schema = {"format": {"type": "json_schema", "name": "weather", "schema": WEATHER["parameters"]}}
    body = {"input": "Weather?", "tools": [WEATHER], "text": schema}
    with calling.http() as http:
        http.post("/v1/responses", json=body | {"tool_choice": "required"}).raise_for_status()
        assert not played.asked.sampling.HasField("json_schema")
        http.post("/v1/responses", json=body).raise_for_status()
        assert json.loads(played.asked.sampling.json_schema) == WEATHER["parameters"]


def test_an_answer_in_moments_has_them_and_captions(calling: Gateway, played: Played) -> None:
    form = {"type": "moments", "grain_s": 0.5, "captions": "srt"}
    body = {"input": [{"role": "user", "content": [part("video", video_url=CLIP_URL), WHY]}], "text": {"format": form}}
    with calling.http() as http:
        whole = http.post("/v1/responses", json=body).raise_for_status().json()
        streamed = http.post("/v1/responses", json=body | {"stream": True}).raise_for_status().text
        stored = http.get(f"/v1/responses/{whole['id']}").raise_for_status().json()
    assert played.asked.sampling.moments.grain_s == 0.5
    assert whole["text"]["format"] == form
    named = {"media_index": 0, "first_slice": 0} | MessageToDict(MOMENT, preserving_proto_field_name=True)
    assert whole["moments"] == [named]
    assert whole["captions"] == "1\n00:00:00,500 --> 00:00:01,500\nIt moves.\n\n"  # a blank line ends a caption
    last = json.loads(streamed.strip().rpartition("data: ")[2])["response"]
    assert without_ids(last) == without_ids(whole) == without_ids(stored)


def test_a_failure_is_the_last_event(calling: Gateway) -> None:
    body = {"input": "fail", "tools": [WEATHER], "stream": True}
    with calling.http() as http:
        events = events_in(http.post("/v1/responses", json=body).raise_for_status().text)
        failed = events[-1]["response"]
        assert (events[-1]["type"], failed["status"], failed["error"]["code"]) == (
            "response.failed",
            "failed",
            "server_error",
        )
        assert "generation" in failed["error"]["message"]
        assert failed["store"] is False
        text = http.get("/metrics").text
    assert metric_in(text, "gridsieve_requests_total", method="Responses", code="UNAVAILABLE") == 1


CLOCK = {"type": "function", "name": "clock"}
CITIES = {"type": "object", "properties": {"city": {"enum": ["Kyoto", "Rome"]}}, "required": ["city"]}


def test_calls_of_real_services_are_made_and_their_results_answered(scripted_door: Gateway) -> None:
    asked = {"role": "user", "content": "Weather?"}
    body = {"input": [asked], "tools": [WEATHER | {"parameters": CITIES}], "max_output_tokens": 400}
    must = body | {"tool_choice": "required", "parallel_tool_calls": False}
    with scripted_door.http() as http:
        response = http.post("/v1/responses", json=must).raise_for_status().json()
        (call,) = response["output"]
        assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
        assert json.loads(call["arguments"])["city"] in ("Kyoto", "Rome")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain."}
        after = body | {"input": [asked, call, result], "max_output_tokens": 8}
        answer = http.post("/v1/responses", json=after).raise_for_status().json()
        assert answer["usage"]["input_tokens"] > response["usage"]["input_tokens"]
        continued = body | {"previous_response_id": response["id"], "input": [result], "max_output_tokens": 8}
        again = http.post("/v1/responses", json=continued).raise_for_status().json()
        assert (again["output"][0]["content"], again["usage"]["input_tokens"]) == (
            answer["output"][0]["content"],
            answer["usage"]["input_tokens"],
        )
        broken = http.post("/v1/responses", json=body | {"input": [asked, call | {"arguments": "x"}, result]})
        assert (broken.status_code, broken.json()["error"]["param"]) == (400, "input[1].arguments"), broken.text
        free = http.post("/v1/responses", json=body | {"tools": [WEATHER, CLOCK]}).raise_for_status().json()
        assert [item.get("name") for item in free["output"]] == [None, "weather", "clock"]
        assert free["output"][0]["content"][0]["text"] == LOOK
        named = http.post("/v1/responses", json=body | {"tools": [WEATHER | {"name": "a b"}]})
        assert (named.status_code, named.json()["error"]["param"]) == (400, "tools[0].name"), named.text
