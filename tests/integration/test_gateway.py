"""The HTTP gateway before three real services: OpenAI's client gets what gRPC's gets, and errors name the field."""

from __future__ import annotations

import asyncio
import io
import json
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import openai
import PIL.Image
import pytest

from gridsieve import Frames, GridsieveClient, Image, Message, Pruning, Text, Video, encode
from gridsieve.client.prompt import Options
from tests import media
from tests.integration.conftest import OTHER_NAME, SEEING, SERVED_NAME, metric
from tests.integration.fleet import Stack, metric_in, until
from tests.integration.gateway import Gateway, brought, data_url, image, question, video
from tests.integration.test_metrics import assert_documented
from tests.preprocessing.media_server import ok, serving
from tests.preprocessing.preprocessing_media import clip

CLIP, OTHER = media.clip(16, fps=4), media.clip(8, fps=4, seed=1)
PICTURE = media.picture(60, 90)
CLIP_URL, OTHER_URL = data_url("video/mp4", CLIP), data_url("video/mp4", OTHER)
FRAMES = tuple(media.picture(112, 112, seed) for seed in range(4))
PICTURE_URL = data_url("image/png", PICTURE)
RUNNING = "gridsieve_requests_running"
GREEDY = Options(temperature=0, max_new_tokens=8, logprobs=True)


def user(*parts: Any) -> Message:
    return Message("user", parts)


SAME: dict[str, tuple[list[Any], list[Message]]] = {
    "video_url": ([video(CLIP_URL), "What?"], [user(Video(data=CLIP), Text("What?"))]),
    "input_video": ([{"type": "input_video", "input_video": CLIP_URL}, "?"], [user(Video(data=CLIP), Text("?"))]),
    "several": (
        [video(CLIP_URL), "and", image(PICTURE_URL), video(OTHER_URL), "?"],
        [user(Video(data=CLIP), Text("and"), Image(data=PICTURE), Video(data=OTHER), Text("?"))],
    ),
    "all pictures": (
        [video(data_url("video/jpeg", *FRAMES), media_io_kwargs={"video": {"num_frames": -1}}), "?"],
        [user(Video(frames=Frames(FRAMES, (0.0, 1.0, 2.0, 3.0))), Text("?"))],
    ),
    "pictures as frames, one a second": (
        [video(data_url("video/jpeg", *FRAMES)), "?"],
        [user(Video(frames=Frames(FRAMES, (0.0, 1.0, 2.0, 3.0))), Text("?"))],
    ),
    "pictures as frames of a video": (
        [
            video(
                data_url("video/jpeg", *FRAMES),
                media_io_kwargs={"video": {"fps": 8.0, "frames_indices": [0, 4, 6, 8]}},
                pruning={"rate": 0.5},
            ),
            "?",
        ],
        [user(Video(frames=Frames(FRAMES, (0.0, 0.5, 0.75, 1.0)), pruning=Pruning(0.5)), Text("?"))],
    ),
    "pruned by itself": (
        [video(CLIP_URL, pruning={"rate": 0.5, "method": "random", "seed": 3}), video(OTHER_URL), "?"],
        [user(Video(data=CLIP, pruning=Pruning(0.5, "random", 3)), Video(data=OTHER), Text("?"))],
    ),
}
OF_READING = {
    "a number of frames": ({"num_frames": 6}, {"num_frames": 6}),
    "frames by index": ({"frames_indices": [0, 5, 6, 15]}, {"frame_indices": (0, 5, 6, 15)}),
    "as many frames as there are": ({"num_frames": 100}, {"num_frames": 16}),
    "all frames": ({"num_frames": -1, "fps": -1}, {"num_frames": 16}),
    "a number of frames below what a rate asks for": ({"num_frames": 6, "fps": 2.0}, {"num_frames": 6}),
    "a rate that asks for less than a number of frames": ({"num_frames": 32, "fps": 0.5}, {"num_frames": 2}),
    "an end": ({"duration": 2.0}, {"end_s": 2}),
}
FPS_1 = {"mm_processor_kwargs": {"fps": 1.0, "min_frames": 2}}
OF_FRAMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "frames chosen": (FPS_1, {"fps": 1, "min_frames": 2}),
    "a number for the processor": ({"mm_processor_kwargs": {"num_frames": 6}}, {"num_frames": 6}),
    "all frames read, and chosen by a rate": (
        {"media_io_kwargs": {"video": {"num_frames": -1, "fps": 4}}, **FPS_1},
        {"fps": 1, "min_frames": 2},
    ),
    **{name: ({"media_io_kwargs": {"video": sent}}, read) for name, (sent, read) in OF_READING.items()},
}
SAME |= {
    name: ([video(CLIP_URL, **sent), "?"], [user(Video(data=CLIP, **read), Text("?"))])
    for name, (sent, read) in OF_FRAMES.items()
}


@pytest.mark.parametrize("name", SAME)
async def test_every_part_is_answered_as_by_grpc(stack: Stack, http: httpx.Client, name: str) -> None:
    parts, messages = SAME[name]
    body = question(*parts, logprobs=True)
    got = await asyncio.to_thread(lambda: http.post("/v1/chat/completions", json=body).raise_for_status().json())
    async with GridsieveClient(stack.address) as client:
        wanted = await client.answer(messages, GREEDY)
    assert_same(got, wanted)


async def test_keyframes_are_answered_as_these_frames_by_grpc_and_the_usage_tells_it(
    stack: Stack, http: httpx.Client
) -> None:
    clip = media.clip(16, fps=4, keyframe_every=4)
    body = question(video(data_url("video/mp4", clip), mm_processor_kwargs={"mode": "keyframes"}), "?", logprobs=True)
    got = await asyncio.to_thread(lambda: http.post("/v1/chat/completions", json=body).raise_for_status().json())
    async with GridsieveClient(stack.address) as client:
        wanted = await client.answer([user(Video(data=clip, frame_indices=(0, 4, 8, 12)), Text("?"))], GREEDY)
        asked = await client.answer([user(Video(data=clip, mode="keyframes"), Text("?"))], GREEDY)
    assert_same(got, wanted)
    (item,), (told,) = got["usage"]["gridsieve"]["media"], asked.usage.media
    assert (item["sampling_mode"], item["sampled_frames"]) == ("keyframes", 4)
    assert (told.sampling_mode, told.sampled_frames) == ("keyframes", 4)


async def test_embeddings_are_answered_as_the_media_that_they_come_from(stack: Stack, http: httpx.Client) -> None:
    encoded = await encode(stack.addresses["encoder"], [Video(data=CLIP), Image(data=PICTURE)])
    clip, picture = (each.as_embeds() for each in encoded)
    parts = brought("video_embeds", clip, pruning={"rate": 0.5}), brought("image_embeds", picture)
    body = question(*parts, "What?", logprobs=True, mm_processor_kwargs={"fps": 1.0})
    got = await asyncio.to_thread(lambda: http.post("/v1/chat/completions", json=body).raise_for_status().json())
    messages = [user(Video(data=CLIP, pruning=Pruning(0.5, "evs")), Image(data=PICTURE), Text("What?"))]
    async with GridsieveClient(stack.address) as client:
        wanted = await client.answer(messages, GREEDY)
    assert_same(got, wanted)


def assert_same(got: Any, wanted: Any) -> None:
    (choice,) = got["choices"]
    assert choice["message"]["content"] == wanted.text
    assert choice["finish_reason"] == wanted.reason.value
    tokens = choice["logprobs"]["content"]
    assert [each["token"] for each in tokens] == [wanted.choices[0].token_texts[each] for each in wanted.token_ids]
    assert [each["logprob"] for each in tokens] == pytest.approx(wanted.logprobs, abs=1e-5)
    assert all(bytes(each["bytes"]) for each in tokens)
    usage = got["usage"]
    assert usage["prompt_tokens"] == wanted.usage.prompt_tokens
    assert usage["completion_tokens"] == wanted.usage.completion_tokens
    assert usage["gridsieve"]["prompt_tokens_full"] == wanted.usage.prompt_tokens_full
    assert [item["kept_tokens"] for item in usage["gridsieve"]["media"]] == [
        item.num_kept for item in wanted.usage.media
    ]
    stages = usage["gridsieve"]["stages_s"]
    assert len(stages) == 10
    assert sum(stages.values()) == pytest.approx(usage["gridsieve"]["time_to_first_token_s"], abs=1e-6)


async def test_earlier_turns_a_system_message_and_a_url_are_answered_as_by_grpc(
    stack: Stack, http: httpx.Client, fetch_port: int
) -> None:
    url = f"http://localhost:{fetch_port}/clip.mp4?signature=1"
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [video(url), {"type": "text", "text": "What?"}]},
        {"role": "assistant", "content": "A square.", "refusal": None, "tool_calls": []},
        {"role": "user", "content": "Which colour?"},
    ]
    body = {"messages": turns, "temperature": 0, "max_completion_tokens": 8, "logprobs": True, "pruning": {"rate": 0.5}}
    async with serving(ok(CLIP), port=fetch_port), GridsieveClient(stack.address) as client:
        got = await asyncio.to_thread(lambda: http.post("/v1/chat/completions", json=body).raise_for_status().json())
        messages = [
            Message("system", (Text("Be brief."),)),
            user(Video(url=url), Text("What?")),
            Message("assistant", (Text("A square."),)),
            user(Text("Which colour?")),
        ]
        wanted = await client.answer(messages, Options(**GREEDY, pruning_rate=0.5))  # type: ignore[misc]
    assert_same(got, wanted)


async def test_openai_clients_stream_what_they_get_at_once(door: Gateway) -> None:
    body = question(video(CLIP_URL), "What?", n=2, seed=5, logprobs=True, top_logprobs=2) | {"temperature": 1.0}
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="unused") as client:
        whole = await client.chat.completions.create(model=SERVED_NAME, **body)
        stream = await client.chat.completions.create(
            model=SERVED_NAME, stream=True, stream_options={"include_usage": True}, **body
        )
        chunks = [chunk async for chunk in stream]
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="unused") as client:
        again = client.chat.completions.create(model=SERVED_NAME, **body)
        assert [model.id for model in client.models.list()] == [SERVED_NAME, OTHER_NAME, "small", "large", SEEING]
    assert [choice.model_dump() for choice in again.choices] == [choice.model_dump() for choice in whole.choices]
    for choice in whole.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices and chunk.choices[0].index == choice.index]
        assert own[0].delta.role == "assistant"
        assert "".join(each.delta.content or "" for each in own) == choice.message.content
        assert [top for each in own if each.logprobs for top in each.logprobs.content] == choice.logprobs.content
        assert [each.finish_reason for each in own if each.finish_reason] == [choice.finish_reason]
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert len(usages) == 1
    assert usages[0].completion_tokens == whole.usage.completion_tokens
    assert not chunks[-1].choices


SPLITTING = "a\u2028b\u2029c\u0085d"


def test_chunks_of_a_stream_are_lines_of_ascii_and_have_no_usage_but_the_last(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {SPLITTING: {"const": 1}}, "required": [SPLITTING]}
    body = question("Why?", stream=True, stream_options={"include_usage": True}, max_tokens=40)
    body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    lines = http.post("/v1/chat/completions", json=body).raise_for_status().text.splitlines()
    *chunks, done = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert done == "[DONE]"
    *chunks, last = map(json.loads, chunks)
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["usage"]["completion_tokens"] > 0
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert SPLITTING in text


async def test_a_model_is_a_name_of_the_checkpoint_or_an_adapter(stack: Stack, http: httpx.Client) -> None:
    async with GridsieveClient(stack.address) as client:
        for name, told, adapter in (
            (SERVED_NAME, SERVED_NAME, None),
            (OTHER_NAME, SERVED_NAME, None),
            ("large", "large", "large"),
        ):
            body = question("Why?", model=name, logprobs=True)
            got = await asyncio.to_thread(lambda: http.post("/v1/chat/completions", json=body).json())  # noqa: B023
            assert got["model"] == told
            assert_same(got, await client.answer([user(Text("Why?"))], Options(**GREEDY, adapter=adapter)))  # type: ignore[misc]
    unknown = http.post("/v1/chat/completions", json=question("Why?", model="gpt-4o"))
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "NOT_FOUND")
    assert http.get("/v1/models/large").json()["parent"] == SERVED_NAME
    assert http.get(f"/v1/models/{OTHER_NAME}").json()["id"] == OTHER_NAME
    assert http.get("/v1/models/huge").status_code == 404


def moving_gif() -> bytes:
    """Three pictures."""
    first, *others = (PIL.Image.open(io.BytesIO(media.picture(56, 56, seed))).convert("RGB") for seed in range(3))
    file = io.BytesIO()
    first.save(file, "GIF", save_all=True, append_images=others, duration=500)
    return file.getvalue()


SAME_MEDIA = {
    "moving.gif": (moving_gif(), "image", "video"),
    "still.gif": (media.picture(56, 56), "image", "image"),
    "clip.flv": (clip(4, 4, "flv", "flv"), "video", "video"),
}


@pytest.mark.parametrize("name", SAME_MEDIA)
async def test_a_medium_is_the_same_from_every_source(
    stack: Stack, http: httpx.Client, media_root: Path, fetch_port: int, name: str
) -> None:
    """Of wrong names and types, too."""
    data, in_image_url, elsewhere = SAME_MEDIA[name]
    (media_root / name).write_bytes(data)
    inline = data_url("application/octet-stream", data)
    head, body = inline.split(",")
    urls = [
        inline,
        data_url("image/jpeg", data),
        f"{head},{quote(body, safe='')}",
        f"http://localhost:{fetch_port}/{name}",
        f"http://localhost:{fetch_port}/photo.jpg?x={name}",
        f"file://{media_root}/{name}",
        f"file://localhost{quote(str(media_root))}/{quote(name, safe='')}",
    ]
    kept = http.post("/v1/files", files={"file": ("photo.jpg", data, "image/jpeg")}).raise_for_status().json()
    files = [{"file_data": inline}, {"file_data": body, "filename": name}, {"file_id": kept["id"]}]
    async with serving(ok(data), port=fetch_port), GridsieveClient(stack.address) as client:

        def found(*parts: Any) -> set[str]:
            answer = http.post("/v1/chat/completions", json=question(*parts, "?", max_tokens=1))
            items = answer.raise_for_status().json()["usage"]["gridsieve"]["media"]
            return {f"{item['modality']} {item['grid']}" for item in items}

        images = await asyncio.to_thread(found, *map(image, urls))
        others = await asyncio.to_thread(found, *map(video, urls), *({"type": "file", "file": file} for file in files))
        by_client = await client.ask([media_root / name, *urls[1:], Video(server_path=name)], "?", max_new_tokens=1)
    assert [len(images), len(others)] == [1, 1]
    assert images.pop().startswith(in_image_url)
    assert others.pop().startswith(elsewhere)
    assert {item.modality.value for item in by_client.usage.media} == {elsewhere}
    http.delete(f"/v1/files/{kept['id']}")


async def test_a_client_that_leaves_cancels_its_question_within_a_second(stack: Stack, door: Gateway) -> None:
    running = partial(metric, stack, "generation", RUNNING, method="Generate")
    for stream in (False, True):
        body = question("Why?", max_tokens=1000, ignore_eos=True, stream=stream)
        async with httpx.AsyncClient(base_url=door.url, timeout=60) as client:
            asking = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await until(lambda: running() == 1)
            asking.cancel()
            await asyncio.wait([asking])
        await until(lambda: running() == 0, within_s=1)


def test_kept_tokens_are_refused_without_an_encoder(http: httpx.Client) -> None:
    refused = http.post("/v1/gridsieve/kept", json=question(video(CLIP_URL)))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, None)
    assert refused.json()["error"]["message"].endswith("without --encoder")


def test_metrics_and_health_are_told(door: Gateway, http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json=question("Why?", n=17))
    assert http.get("/health").json() == {"status": "serving"}
    text = http.get("/metrics").text
    assert metric_in(text, "gridsieve_requests_total", method="ChatCompletions", code="INVALID_ARGUMENT") > 0
    assert metric_in(text, "gridsieve_refusals_total", method="ChatCompletions", reason="INVALID_REQUEST") > 0
    assert metric_in(text, RUNNING, method="ChatCompletions") == 0
    assert_documented("gateway", text)
    ended = [json.loads(line) for line in door.log.read_text().splitlines() if '"request ended"' in line]
    assert {"request_id", "code", "seconds", "received_bytes"} <= ended[-1].keys()
