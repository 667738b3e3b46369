"""Moments at every door: an answer names the video's own times alone, although the model is random."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import webvtt
from tokenizers import Tokenizer
from typer.testing import CliRunner

from gridsieve import GridsieveClient, Moment, Video
from gridsieve.__main__ import app
from gridsieve.client.prompt import Image, Options
from gridsieve.common.checkpoint import DEMO_MODEL
from gridsieve.common.contract.errors import InvalidRequest
from tests import media
from tests.integration.fleet import Stack
from tests.integration.gateway import Gateway, data_url, question, video

FPS, FRAMES = 4, 8
CLIP = media.clip(FRAMES, fps=FPS)
# A slice shows two frames, and its time is the middle between theirs; the last time is that of the last frame.
SLICES_S = [(first + 0.5) / FPS for first in range(0, FRAMES, 2)]
END_S = (FRAMES - 1) / FPS
WHOLE = Video(data=CLIP, fps=FPS)
# So that descriptions of a random model end. Half of its lists are empty.
ENDING = {Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")).token_to_id('"'): 4.0}
SAMPLED = Options(temperature=1.0, seed=5, max_new_tokens=200, n=16, logit_bias=ENDING)


def check(moments: tuple[Moment, ...], times: list[float]) -> None:
    assert all(moment.start_s in times and moment.end_s in times for moment in moments)
    assert all(moment.start_s < moment.end_s for moment in moments)
    assert all(one.start_s <= next_.start_s for one, next_ in pairwise(moments))


async def test_moments_are_at_the_times_of_the_slices_in_order(client: GridsieveClient) -> None:
    answer = await client.ask(WHOLE, "What moves, and when?", moments=True, **SAMPLED)
    assert any(choice.moments for choice in answer.choices)
    for choice in answer.choices:
        check(choice.moments, [*SLICES_S, END_S])
        for moment in choice.moments:
            assert (moment.media_index, moment.kept) == (0, True)
            assert SLICES_S[moment.first_slice] == moment.start_s
            assert moment.last_slice == min(len(SLICES_S) - 1, [*SLICES_S, END_S].index(moment.end_s))
        if choice.reason.value == "stop":
            told = json.loads(choice.text)
            assert [each["description"] for each in told] == [moment.description for moment in choice.moments]
            # The family writes mm:ss.ff.
            assert all(each["start_time"][:3] == "00:" for each in told)


async def test_a_grain_takes_the_place_of_the_slices(client: GridsieveClient) -> None:
    answer = await client.ask(WHOLE, "When?", moments=0.25, **SAMPLED)
    for choice in answer.choices:
        check(choice.moments, [number / 4 for number in range(8)])


async def test_each_of_several_videos_has_its_own_times(client: GridsieveClient) -> None:
    short = Video(data=media.clip(4, fps=2, seed=1), fps=2)
    shown = [short, Image(data=media.picture(56, 56)), WHOLE]
    answer = await client.ask(shown, "When?", moments=True, **SAMPLED)
    times = {0: [0.25, 1.25, 1.5], 2: [*SLICES_S, END_S]}
    found = [moment for choice in answer.choices for moment in choice.moments]
    assert {moment.media_index for moment in found} == {0, 2}
    for index in times:
        for choice in answer.choices:
            check(tuple(each for each in choice.moments if each.media_index == index), times[index])


async def test_a_moment_says_whether_pruning_kept_tokens_of_it(client: GridsieveClient) -> None:
    # EVS keeps the first slice alone.
    pruned = Options(pruning_rate=0.75, pruning_method="evs")
    found = list[Moment]()
    for grain in (True, 1.0):  # the second has one moment, from 0 to 1 s
        answer = await client.ask(WHOLE, "When?", moments=grain, **SAMPLED, **pruned)
        assert answer.usage.media[0].first_slice_only
        found += [moment for choice in answer.choices for moment in choice.moments]
    assert {moment.kept for moment in found} == {False, True}
    assert all(moment.kept == (moment.first_slice == 0) for moment in found)


async def test_a_schema_has_times_of_the_video(client: GridsieveClient) -> None:
    time = {"type": "number", "format": "video-time"}
    schema = {
        "type": "object",
        "properties": {"first": time, "second": time | {"multipleOf": 0.5}, "third": {"format": "video-time"}},
        "required": ["first", "second", "third"],
    }
    answer = await client.ask(WHOLE, "When?", json_schema=schema, **SAMPLED)
    for choice in answer.choices:
        told = json.loads(choice.text)
        jsonschema.validate(told, schema | {"additionalProperties": False})
        assert told["first"] in [*(round(time_s, 1) for time_s in SLICES_S), 1.7]  # END_S would round to 1.8, after it
        assert told["second"] in (0.0, 0.5, 1.0, 1.5)
        assert told["third"] in [f"00:{round(time_s, 2):05.2f}" for time_s in (*SLICES_S, END_S)]


@pytest.mark.parametrize(
    ("shown", "options", "why"),
    [
        (None, Options(moments=True), "moments needs a video in the prompt"),
        (WHOLE, Options(moments=0.0), "grain_s must be finite and above 0, got 0"),
        (WHOLE, Options(moments=1e-300), r"moments.grain_s must be above 0.000427\d* for this video, got 1e-300"),
        (WHOLE, Options(moments=True, json_object=True), "moments must not be set together with json_object"),
        (None, Options(json_schema={"format": "video-time"}), "json_schema needs a video in the prompt"),
        ([WHOLE, WHOLE], Options(json_schema={"format": "video-time"}), "`video` must be 1 to 2, got None"),
    ],
)
async def test_times_that_cannot_be_had_are_refused_by_name(
    client: GridsieveClient, shown: Any, options: Options, why: str
) -> None:
    with pytest.raises(InvalidRequest, match=why):
        await client.ask(shown, "When?", **options)


def test_over_http_a_choice_has_moments_and_captions(door: Gateway) -> None:
    clip, wanted = video(data_url("video/mp4", CLIP)), {"type": "moments", "captions": "srt"}
    body = question(clip, "When?", temperature=1, seed=5, max_tokens=200, n=16, response_format=wanted)
    body["logit_bias"] = {str(token_id): bias for token_id, bias in ENDING.items()}
    body |= {"mm_processor_kwargs": {"fps": FPS}}
    with door.http() as http:
        choices = http.post("/v1/chat/completions", json=body).raise_for_status().json()["choices"]
        streamed = http.post("/v1/chat/completions", json=body | {"stream": True}).raise_for_status().text
    chunks = [json.loads(line[6:])["choices"][0] for line in streamed.splitlines() if line.startswith("data: {")]
    assert {each["index"]: each["moments"] for each in chunks if each["finish_reason"]} == {
        each["index"]: each["moments"] for each in choices
    }
    longest = max(choices, key=lambda each: len(each["captions"]))
    captions = webvtt.from_buffer(io.BytesIO(longest["captions"].encode()), format="srt", strict=True)
    assert [(cue.start_in_seconds, cue.end_in_seconds) for cue in captions] == shown(longest["moments"]) != []


def test_over_http_a_response_refuses_a_grain_that_is_too_fine(door: Gateway) -> None:
    asked = [{"type": "input_video", "video_url": data_url("video/mp4", CLIP)}, {"type": "input_text", "text": "When?"}]
    body = {"input": [{"role": "user", "content": asked}]}
    with door.http() as http:
        fine = {"text": {"format": {"type": "moments", "grain_s": 1e-300}}}
        refused = http.post("/v1/responses", json=body | fine).json()
    assert refused["error"]["param"] == "text.format.grain_s", refused


def test_the_command_writes_captions(stack: Stack, tmp_path: Path) -> None:
    clip, file = tmp_path / "clip.mp4", tmp_path / "clip.vtt"
    clip.write_bytes(CLIP)
    flags = ["--fps", str(FPS), "--temperature", "1", "--seed", "5", "--max-new-tokens", "200", "--json"]
    flags += ["--captions", str(file), "--server", stack.address]
    result = CliRunner().invoke(app, ["ask", str(clip), "When?", *flags])
    assert result.exit_code == 0, result.output
    captions = webvtt.from_string(file.read_text(), strict=True)
    assert [(cue.start_in_seconds, cue.end_in_seconds) for cue in captions] == shown(
        json.loads(result.stdout).get("moments", [])
    )


def shown(moments: Sequence[Mapping[str, Any]]) -> list[tuple[int, int]]:
    """When captions begin and end, in whole seconds, as the parser tells them."""
    return [(int(each["start_s"]), int(each["end_s"])) for each in moments if each["description"].split()]
