"""GET /v1/realtime: OpenAI's client gets what gRPC's Live call tells, in events of OpenAI's types."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from inspect import isclass
from pathlib import Path
from types import NoneType
from typing import Any, cast, get_args, get_origin

import pytest
import uvicorn
from openai import AsyncOpenAI
from openai.types.realtime import (
    ConversationItemCreateEvent,
    RealtimeClientEvent,
    RealtimeServerEvent,
    RealtimeSessionCreateRequest,
    ResponseCreateEvent,
)
from openai.types.realtime.realtime_conversation_item_user_message import Content
from openai.types.realtime.realtime_conversation_item_user_message import (
    RealtimeConversationItemUserMessage as UserItem,
)
from playwright.async_api import async_playwright, expect
from pydantic import BaseModel, TypeAdapter
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.limits import MAX_PICTURE_BYTES
from gridsieve.common.process import ExitStatus
from gridsieve.services.gateway.http.websocket import MAX_PARTS, WebSocketProtocol
from gridsieve.services.gateway.realtime.request import REFUSED, parse
from gridsieve.v1 import prompt_pb2
from gridsieve.v1.generation_pb2 import Sampling
from tests.integration.fleet import TIMED, Stack, until
from tests.integration.gateway import Gateway, data_url, gateway
from tests.integration.test_live import MAX_PIXELS, PICTURES, QUESTION, SECOND, watching

FRAMES = [data_url("image/png", picture) for picture in PICTURES]
OWN = {"pruning": {"method": "none"}, "max_pixels": MAX_PIXELS, "window_tokens": 512, "answer_tokens": 128}
WATCHING = {"type": "realtime", "temperature": 0, "max_output_tokens": 6, "gridsieve": OWN}
ANSWER_MS = 60_000
DONE = "conversation.item.done"
TOKEN = "a/secret+of0123456789=="
CHECKED = TypeAdapter(RealtimeServerEvent)


@pytest.fixture(scope="module")
def door(live_door: Gateway) -> Gateway:
    return live_door


class Talk:
    """A session by OpenAI's client, and its events so far. Those with OpenAI's names are of its types."""

    def __init__(self, connection: Any) -> None:
        self.by = connection
        self.seen: list[dict[str, Any]] = []

    async def until(self, kind: str) -> dict[str, Any]:
        """Reads up to the next event of this kind."""
        while True:
            data = await asyncio.wait_for(self.by.recv_bytes(), 60)
            event = json.loads(data)
            assert self.by.parse_event(data).type == event["type"]  # it takes ours, too
            if not event["type"].startswith("gridsieve."):
                CHECKED.validate_python(event)
            self.seen.append(event)
            if event["type"] == kind:
                return event

    async def show(self, first: int, end: int, **part: Any) -> None:
        """Sends frames, a slice at a time, and waits for each."""
        for place in range(first, end):
            await self.send(image(place, time_s=place / 2) | part)
            if place % 2:
                await self.until("gridsieve.slice")

    async def send(self, *parts: dict[str, Any]) -> None:
        await self.by.conversation.item.create(item={"type": "message", "role": "user", "content": list(parts)})

    async def answer(self, **response: Any) -> dict[str, Any]:
        await self.by.response.create(response=response)
        return (await self.until("response.done"))["response"]

    def text(self) -> str:
        return "".join(each["delta"] for each in self.seen if each["type"] == "response.output_text.delta")


def image(place: int, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": FRAMES[place], **fields}


def words(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


@asynccontextmanager
async def talking(door: Gateway, session: dict[str, Any] | None = WATCHING) -> AsyncIterator[Talk]:
    client = AsyncOpenAI(base_url=f"{door.url}/v1", api_key="unused")
    async with client, client.realtime.connect() as connection:
        talk = Talk(connection)
        await talk.until("session.created")
        if session is not None:
            await connection.session.update(session=session)
            await talk.until("session.updated")
        yield talk


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


def made(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"type": "conversation.item.create", "item": {"type": "message", "role": "user", "content": list(parts)}}


def updated(**session: Any) -> dict[str, Any]:
    return {"type": "session.update", "session": session}


def asked(**response: Any) -> dict[str, Any]:
    return {"type": "response.create", "response": response}


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


async def refusal(door: Gateway, **options: Any) -> tuple[int, str]:
    with pytest.raises(InvalidStatus) as refused:
        async with opened(door, **options):
            pass
    response = refused.value.response
    assert response.headers["x-request-id"]
    return response.status_code, json.loads(response.body)["error"]["type"]


def opened(door: Gateway, query: str = "", **options: Any) -> Any:
    return connect(f"ws://127.0.0.1:{door.port}/v1/realtime{query}", proxy=None, **options)


async def test_it_has_the_doors_access_and_limits(live_stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_text(f"alice {TOKEN}\n")
    flags = ["--auth-tokens-file", str(tmp_path / "tokens"), "--cors-origins", "https://page.example"]
    flags += ["--max-inline-bytes", "300000", "--max-requests", "1", "--drain-s", "0.2"]
    flags += ["--max-bytes-per-client", "1000000"]
    key = {"additional_headers": {"authorization": f"Bearer {TOKEN}"}}
    with gateway(live_stack.address, tmp_path, *flags) as guarded:
        assert await refusal(guarded) == (401, "authentication_error")
        assert await refusal(guarded, **key, query="?model=other") == (404, "not_found_error")
        assert await refusal(guarded, **key, origin="https://other.example") == (403, "permission_error")
        assert await refusal(guarded, **key, origin="http://[") == (403, "permission_error")
        for origin in ("https://page.example", guarded.url):
            async with opened(guarded, **key, origin=origin) as socket:
                assert json.loads(await socket.recv())["type"] == "session.created"
        encoded = TOKEN.replace("/", "%2F").replace("=", "%3D")
        async with opened(guarded, subprotocols=["realtime", f"openai-insecure-api-key.{encoded}"]) as socket:
            assert socket.subprotocol == "realtime"
            await socket.recv()
            assert await refusal(guarded, **key) == (429, "rate_limit_error")
            for letters, param in ((600_000, None), (400_000, "response_id")):  # each letter is two bytes
                event = {"type": "response.cancel", "event_id": f"of {letters}", "response_id": "é" * letters}
                await socket.send(json.dumps(event, ensure_ascii=False))
                error = json.loads(await socket.recv())["error"]
                assert (error["event_id"], error["param"]) == (event["event_id"], param)
            with suppress(ConnectionClosed):
                await socket.send("x" * 5_000_000)
            await socket.wait_closed()
            assert socket.close_code == 1009
        async with opened(guarded, **key) as socket:
            await socket.recv()
            guarded.process.send_signal(signal.SIGTERM)
            assert "draining" in json.loads(await socket.recv())["error"]["message"]
            with pytest.raises(ConnectionClosed) as closed:
                await socket.recv()
            assert closed.value.rcvd.code == 1012
        assert await asyncio.to_thread(guarded.process.wait, 20) == ExitStatus.CUT_OFF
    log = guarded.log.read_text()
    assert TOKEN not in log
    lines = [json.loads(line) for line in log.splitlines()]
    ends = [line["code"] for line in lines if line["event"] == "request ended" and line["method"] == "Realtime"]
    assert Counter(ends) == {
        "UNAUTHENTICATED": 1,
        "INVALID_ARGUMENT": 3,
        "RESOURCE_EXHAUSTED": 1,
        "OK": 3,
        "UNAVAILABLE": 1,
    }


@pytest.mark.deep  # of times, which a busy machine makes longer
async def test_large_pictures_do_not_hold_up_the_gateways_loop(live_stack: Stack, tmp_path: Path) -> None:
    """As in test_event_loop.py: a fault is slow in every round."""
    # Readers skip what follows the picture. To join the parts of the largest message takes about as long as is slow.
    large = PICTURES[0] + bytes(MAX_PICTURE_BYTES // 2 - len(PICTURES[0]))
    shown, slow = made(image(0) | {"image_url": data_url("image/png", large)}), list[set[str]]()
    with gateway(live_stack.address, tmp_path, program=TIMED.format(name="gateway")) as timed:
        async with opened(timed) as socket:
            for event in (updated(**WATCHING), *[shown] * 3):
                before = len(timed.log.read_text())
                await socket.send(json.dumps(event))
                while (told := json.loads(await socket.recv()))["type"] not in ("session.updated", DONE):
                    assert told["type"] != "error", told
                slow.append(set(re.findall("^SLOW (.*)", timed.log.read_text()[before:], re.MULTILINE)))
    assert not set.intersection(*slow[1:]), slow


async def test_a_message_of_parts_without_end_ends_the_connection(door: Gateway) -> None:
    async def parts() -> AsyncIterator[str]:
        for _ in range(4 * MAX_PARTS):
            yield ""

    async with opened(door) as socket:
        with suppress(ConnectionClosed):
            await socket.send(parts())
        await asyncio.wait_for(socket.wait_closed(), 10)


async def test_a_client_that_reads_nothing_is_left() -> None:
    """Whatever it sends: pings are answered where there is room alone."""
    left = asyncio.Event()

    async def chatty(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "websocket.accept"})
        try:
            while True:
                await send({"type": "websocket.send", "text": "x" * 60_000})
        finally:
            left.set()

    state = ServerState()
    config = uvicorn.Config(
        chatty,
        log_config=None,
        ws_per_message_deflate=False,
        ws_ping_interval=0.5,
        ws_ping_timeout=0.5,
    )
    loop = asyncio.get_running_loop()
    async with await loop.create_server(lambda: WebSocketProtocol(config, state, {}), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect(f"ws://127.0.0.1:{port}", proxy=None, max_queue=1, close_timeout=0.1) as socket:
            await asyncio.sleep(0.1)
            for number in range(5_000):
                await socket.ping(f"{number:0125}")
            await asyncio.sleep(0.1)
            for connection in state.connections:  # on a busy machine it may be left already
                assert connection.transport.get_write_buffer_size() < 500_000
            await asyncio.wait_for(left.wait(), 2)
            assert not state.connections


async def test_the_page_asks_about_what_the_camera_sees(live_stack: Stack, tmp_path: Path, chromium: str) -> None:
    (tmp_path / "tokens").write_text(f"alice {TOKEN}\n")
    raised: list[str] = []
    arguments = ["--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"]
    with gateway(live_stack.address, tmp_path, "--auth-tokens-file", str(tmp_path / "tokens")) as guarded:
        async with async_playwright() as playwright:
            browser = await playwright.chromium.launch(executable_path=chromium, args=arguments)
            page = await browser.new_page()
            page.on("pageerror", lambda error: raised.append(str(error)))
            await page.goto(guarded.url)
            camera = page.locator("#camera")
            await camera.click()
            await expect(page.locator("#token-error")).to_contain_text("bearer token")
            await expect(camera).to_have_text("Use the camera")
            await page.locator("#token").fill("a(token)")
            await camera.click()
            await expect(page.locator("#question-error")).to_contain_text("subprotocol")
            await page.locator("#token").fill(TOKEN)
            await camera.click()
            seen = page.locator("article.live")
            await expect(seen.locator("canvas")).to_be_visible(timeout=ANSWER_MS)
            names = ("rate", "automatic", "method", "compare", "curl", "python")
            of_clips = [page.locator(f"#{name}") for name in names]
            for each in of_clips:
                await expect(each).to_be_disabled()
            for number in (1, 2):
                await page.get_by_label("Question").fill(f"What moves? {number}")
                await page.get_by_label("Longest answer").fill("8")
                await page.get_by_role("button", name="Ask").click()
                answers = page.locator("article:not(.live)")
                await expect(page.locator("article:not(.live)[aria-busy=false]")).to_have_count(
                    number, timeout=ANSWER_MS
                )
                await expect(answers.first.locator("h2")).to_have_text(f"What moves? {number}")
                await expect(answers.first.locator(".text")).not_to_be_empty()
                await expect(answers.first.locator("dt").first).to_have_text("Prompt tokens")
            # What does not change in the fake camera's picture is dimmed.
            some = re.compile(r"^(\d+) of (?!\1 )\d+ visual tokens are new")
            await expect(seen.locator(".kept figcaption")).to_have_text(some, timeout=ANSWER_MS)
            full, kept = [int(await seen.locator("dd").nth(place).inner_text()) for place in (2, 3)]
            assert 0 < kept < full
            track = await page.evaluate_handle("document.getElementById('player').srcObject.getTracks()[0]")
            await camera.click()
            await expect(camera).to_have_text("Use the camera")
            assert await track.evaluate("track => track.readyState") == "ended"
            await expect(page.locator("#question-error")).to_be_empty()
            for each in of_clips:
                await expect(each).to_be_enabled()
            await browser.close()
        assert not raised
        while await asyncio.to_thread(live_stack.services["generation"].in_use):
            await asyncio.sleep(0.05)
