"""Fields that OpenAI's and vLLM's clients send: those that are used, those that change nothing, and those in errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from gridsieve.client.prompt import Embeds
from gridsieve.common.contract.errors import PromptTooLong
from gridsieve.common.contract.plan import Grid
from gridsieve.services.gateway.chat.content import names_of
from gridsieve.services.gateway.http.errors import in_words
from tests import media
from tests.integration.gateway import brought, data_url, question, video

CLIP_URL = data_url("video/mp4", media.clip(8, fps=4))
PICTURE_URL = data_url("image/png", media.picture(64, 48))
FRAMES = tuple(media.picture(112, 112, seed) for seed in range(4))
UNUSED: list[dict[str, Any]] = [
    {"reasoning_effort": "low", "verbosity": "low", "prompt_cache_key": "a", "seed": -1, "priority": 0}
    | {"skip_special_tokens": True, "add_generation_prompt": True, "echo": False, "length_penalty": 1.0}
    | {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "pruning": {"rate": 0.0, "method": None}}
    | {"chat_template_kwargs": {"enable_thinking": False, "add_generation_prompt": True}}
    | {"mm_processor_kwargs": {"do_sample_frames": True, "num_frames": -1}},
    {"stream_options": None, "structured_outputs": None, "tool_choice": None, "pruning": None},
    {"pruning": {"rate": None, "method": None, "seed": None}},
    {"pruning": {"method": "vcast"}},
    {"best_of": 1, "use_beam_search": False, "early_stopping": False, "include_stop_str_in_output": False}
    | {"spaces_between_special_tokens": True, "add_special_tokens": False, "continue_final_message": False}
    | {"include_reasoning": True, "return_tokens_as_token_ids": False, "return_token_ids": False}
    | {"documents": [], "logits_processors": [], "vllm_xargs": {}, "top_k": -1.0, "n": 1.0, "priority": 0.0}
    | dict.fromkeys(("prompt_logprobs", "truncate_prompt_tokens", "allowed_token_ids", "chat_template", "request_id"))
    | dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "kv_transfer_params", "structural_tag"))
    | {"structured_outputs": {"regex": None, "choice": None, "disable_any_whitespace": False}},
]


def answered(http: httpx.Client, body: dict[str, Any]) -> dict[str, Any]:
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    whole: dict[str, Any] = answer.json()
    return whole


def chunks_of(http: httpx.Client, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = http.post("/v1/chat/completions", json=body | {"stream": True}).raise_for_status().text.split("\n")
    told = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert told[-1] == "[DONE]"
    return [json.loads(each) for each in told[:-1]]


def refused(http: httpx.Client, body: dict[str, Any]) -> tuple[str, str]:
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error["param"], error["message"]


def test_a_remedy_names_fields_of_the_body() -> None:
    remedy = "`frame_sampling.max_pixels` 784, or `frame_sampling.fps` 0.5 would fit"
    said = "^too long; mm_processor_kwargs.max_pixels 784, or mm_processor_kwargs.fps 0.5 would fit$"
    with pytest.raises(PromptTooLong, match=said), in_words(names_of([], {}).name_of):
        raise PromptTooLong("too long", remedy=remedy)


def test_fields_that_change_nothing_are_taken(http: httpx.Client) -> None:
    asked = question("Why?", {"type": "video_url", "video_url": {"url": CLIP_URL}})
    plain = answered(http, asked)
    for fields in UNUSED:
        assert answered(http, asked | fields)["choices"] == plain["choices"]


def test_parts_and_messages_may_carry_what_clients_add(http: httpx.Client) -> None:
    plain = answered(http, question({"type": "image_url", "image_url": {"url": PICTURE_URL}}, "What?"))
    for detail in ("low", "high", "auto"):
        added = {"uuid": "a", "cache_control": {"type": "ephemeral"}}
        part = {"type": "image_url", "image_url": {"url": PICTURE_URL, "detail": detail}, **added}
        asked = question(part, {"type": "text", "text": "What?", **added})
        asked["messages"][0]["name"] = "somebody"
        assert answered(http, asked)["choices"] == plain["choices"]


def test_a_list_of_one_rate_is_that_rate(http: httpx.Client) -> None:
    asked = question({"type": "video_url", "video_url": {"url": CLIP_URL}}, "What?")
    listed, plain = (
        answered(http, asked | {"mm_processor_kwargs": {"fps": fps}})["usage"]["prompt_tokens"] for fps in ([4.0], 4.0)
    )
    assert listed == plain > answered(http, asked)["usage"]["prompt_tokens"]


def test_every_chunk_has_the_usage_so_far_if_it_is_asked_for(http: httpx.Client) -> None:
    asked = question("Why?", ignore_eos=True)
    continuous = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = chunks_of(http, asked | {"stream_options": continuous})
    so_far = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert so_far == sorted(so_far)
    assert so_far[-1] == last["usage"]["completion_tokens"] == 8
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}
    assert all("usage" not in chunk for chunk in chunks_of(http, asked | {"stream_options": {"include_usage": None}}))


def test_vllms_name_of_a_format_is_that_format(http: httpx.Client) -> None:
    schema = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = question("Why?", max_tokens=60)
    plain = answered(http, asked | {"response_format": wanted})
    for given in (schema, json.dumps(schema)):
        assert answered(http, asked | {"structured_outputs": {"json": given}})["choices"] == plain["choices"]
    # Without additionalProperties, an object has no others.
    assert set(json.loads(plain["choices"][0]["message"]["content"])) == {"sure"}
    both = refused(http, asked | {"response_format": wanted, "structured_outputs": {"json_object": True}})
    assert both[0] == "structured_outputs"


def test_errors_name_what_the_caller_wrote(http: httpx.Client) -> None:
    part = {"type": "video_url", "video_url": {"url": CLIP_URL}}

    def param(part: dict[str, Any], **fields: Any) -> str:
        return refused(http, question("Why?", part) | fields)[0]

    own = "messages[0].content[1]"
    assert param(part, mm_processor_kwargs={"video_start": -1.0}) == "mm_processor_kwargs.video_start"
    assert param(part | {"mm_processor_kwargs": {"video_end": 0.0}}) == f"{own}.mm_processor_kwargs.video_end"
    assert param(part, mm_processor_kwargs={"mode": "all"}) == "mm_processor_kwargs.mode"
    assert param(part, mm_processor_kwargs={"max_slice_nums": 2}) == "mm_processor_kwargs.max_slice_nums"  # Qwen's
    assert param(part, media_io_kwargs={"video": {"fps": 2000.0}}) == "media_io_kwargs.video.fps"
    assert param(part | {"pruning": {"rate": 2.0}}) == f"{own}.pruning.rate"
    assert param(part, pruning={"rate": 0.5, "seed": 2**64}) == "pruning.seed"
    assert param(part | {"pruning": {"threshold": 1.0}}) == f"{own}.pruning.threshold"
    pictures = data_url("video/jpeg", media.picture(64, 48), b"none")
    assert param({"type": "video_url", "video_url": {"url": pictures}}) == f"{own}.video_url.url"
    assert param({"type": "input_video", "input_video": "data:video/mp4;base64,AAAA"}) == f"{own}.input_video"
    pictures = {"type": "video_url", "video_url": {"url": data_url("video/jpeg", b"a")}}
    late = {"video": {"frames_indices": [10**400]}}
    assert param(pictures, media_io_kwargs=late) == "media_io_kwargs.video.frames_indices[0]"
    assert "; raise max_tokens" in refused(http, question("Why?", min_tokens=9))[1]
    both = {"json": {}, "json_object": True}
    assert param(part, structured_outputs=both) == "structured_outputs.json_object"
    schema = {"type": "array", "items": {"type": "strin"}}
    assert param(part, structured_outputs={"json": schema}) == "structured_outputs.json"
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert param(part, tools=[tool], tool_choice="required") == "tools"  # the template shows none


def test_errors_of_embeddings_name_their_fields(http: httpx.Client) -> None:
    part = brought("image_embeds", Embeds(bytes(1024), Grid(1, 2, 2), dtype="float32", shape=(4, 64)))
    own = "messages[0].content[1].image_embeds"
    for changes, named in (
        ({"shape": [4, 63]}, f"{own}.shape must be"),
        ({"data": "a"}, f"{own}.data must be base64"),
        ({"dtype": "int8"}, f"{own}.dtype is wrong"),
        ({"grid": {"t": 1, "h": 0, "w": 2}}, f"{own}.grid is invalid"),
        ({"grid": {"t": 2, "h": 1, "w": 2}}, f"{own}.grid.t of an image must be 1"),
        ({"seconds_per_grid": 1.0}, f"{own}.seconds_per_grid and timestamps_s are for videos"),
        ({"seconds_per_grid": 1e-300}, f"{own}.seconds_per_grid must be a quotient"),
        ({"shape": [4, 64, 1, 1]}, f"{own}.shape is wrong"),
    ):
        asked = question("Why?", part | {"image_embeds": part["image_embeds"] | changes})
        assert refused(http, asked)[1].startswith(named)
    saved = part | {"image_embeds": "UEsDBAAACAgAAAAA"}  # what torch.save writes, which vLLM takes: a pickle
    assert refused(http, question("Why?", saved))[0] == own
    chosen = part | {"mm_processor_kwargs": {"fps": 1.0}}
    assert refused(http, question("Why?", chosen))[0] == "messages[0].content[1].mm_processor_kwargs"


UNHELD = {"type": "object", "properties": {"seen": {"type": "array", "uniqueItems": True}}}
REFUSED = [
    ({"temperature": 101}, "temperature", "must be"),
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"max_tokens": 0}, "max_tokens", "must be"),
    ({"max_tokens": None, "max_completion_tokens": 0}, "max_completion_tokens", "must be"),
    ({"best_of": 2}, "best_of", "less than or equal to 1"),
    ({"prompt_logprobs": 0}, "prompt_logprobs", "must not be set"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"logits": 1}, "logits", "is not a field that this service knows"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "must be set"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'function'"),
    ({"tool_choice": "required"}, "tool_choice", "without tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice.function.name", "one of the"),
    ({"chat_template_kwargs": {"thinking_budget": 9}}, "chat_template_kwargs.thinking_budget", "not a variable"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex", "must not be set"),
    ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
    ({"skip_special_tokens": False}, "skip_special_tokens", "True"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UNHELD}}},
        "response_format.json_schema.schema",
        "/properties/seen",
    ),
    ({"pruning": {"rate": 0.5, "method": "best"}}, "pruning.method", "must be"),
    ({"pruning": {"threshold": 0.5, "method": "evs"}}, "pruning.threshold", "is for pixel_change"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "messages[0].role", "'system'"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id", "must be set"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "must be set"),
    (
        {"messages": [{"role": "user", "content": [{"type": "output_audio"}]}]},
        "messages[0].content[0].type",
        "text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
        "messages[0].content[0].input_audio",
        "must be set",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "must be set",
    ),
    ({"mm_processor_kwargs": {"do_resize": True}}, "mm_processor_kwargs.do_resize", "is not a field"),
]


@pytest.mark.parametrize(("change", "field", "why"), REFUSED, ids=lambda value: str(value)[:40])
def test_a_wrong_field_is_named(http: httpx.Client, change: Any, field: str, why: str) -> None:
    answer = http.post("/v1/chat/completions", json=question("Why?") | change)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), error
    assert why in error["message"]
    assert error["message"].startswith(field)


@pytest.mark.parametrize(
    ("part", "status", "why"),
    [
        (video("ftp://host/a.mp4"), 400, "messages[0].content[1].video_url.url must start with https://"),
        (video("data:video/mp4;base64,é"), 400, "messages[0].content[1].video_url.url must be data:[type][;base64],…"),
        (video(data_url("video/mp4", b"no video")), 400, "messages[0].content[1]"),
        (video("http://127.0.0.1/a.mp4"), 403, "messages[0].content[1].video_url.url"),
        (video(CLIP_URL, mm_processor_kwargs={"fps": 0.0}), 400, "messages[0].content[1].mm_processor_kwargs.fps must"),
        (
            video(data_url("video/jpeg", *FRAMES), media_io_kwargs={"video": {"frames_indices": [0]}}),
            400,
            "messages[0].content[1] holds 4 frames, and frames_indices of media_io_kwargs.video 1",
        ),
        (
            video("file:///etc/passwd"),
            403,
            "messages[0].content[1].video_url.url '/etc/passwd' lies outside --media-root",
        ),
        (
            video("file://elsewhere/a.mp4"),
            403,
            "messages[0].content[1].video_url.url must name no host, got 'elsewhere'",
        ),
        ({"type": "file", "file": {"file_id": "file-1"}}, 404, "file_id 'file-1' names no file"),
        ({"type": "file", "file": {}}, 400, "messages[0].content[1].file must have exactly one of"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_media_are_named_before_a_stream_begins(
    http: httpx.Client, part: dict[str, Any], status: int, why: str
) -> None:
    answer = http.post("/v1/chat/completions", json=question("What is", part, stream=True))
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"].startswith(why)
