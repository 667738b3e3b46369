"""Sounds, and clips with their sound, through real processes: transformers' answers, pruned ones, and refusals."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from gridsieve.__main__ import app
from gridsieve.client.answer import Answer
from gridsieve.client.client import GridsieveClient
from gridsieve.client.encoding import Encoded, encode
from gridsieve.client.prompt import Audio, Image, Part, Pruning, Text, Video
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import Modality
from tests import media
from tests.families import FAMILIES, load_reference
from tests.integration.fleet import Stack, running
from tests.integration.gateway import data_url, gateway, question, video
from tests.integration.reference import NEW_TOKENS, check_answer, model_inputs

# So long that its positions pass those of every clip: from there on, `generate` counts as the law does.
QUESTION = "What moves, and what is heard while it moves? Say so in a few words, please."
GREEDY: Any = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "logprobs": True, "timeout_s": 60}
FILM, WIDE = media.clip(16, fps=4, seed=3), media.clip(9, fps=3, width=160, height=96, seed=4)
# Shorter than its pictures, and longer.
SPOKEN = media.with_sound(FILM, media.chirp(2.3))
SUNG = media.with_sound(WIDE, media.chirp(5.1, seed=1))
BELL = media.sound(media.chirp(1.2, seed=2))
PICTURE = Image(data=media.picture(112, 84))
MIXES: tuple[tuple[Part, ...], ...] = (
    (Audio(data=BELL),),
    (Audio(data=BELL), PICTURE, Text("and"), Audio(data=SUNG, start_s=1, end_s=3), Video(data=FILM, fps=2)),
    (Video(data=SPOKEN, fps=2, audio=True),),
    (
        Video(data=SUNG, audio=True),
        PICTURE,
        Text("and"),
        Audio(data=BELL),
        Video(data=SPOKEN, fps=1, audio=True, start_s=1),
    ),
)


@pytest.fixture(scope="module")
def omni(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("qwen2_5_omni")


@pytest.fixture(scope="module")
def hearing(omni: Path) -> Iterator[Stack]:
    with running(omni) as stack:
        yield stack


@pytest.fixture
async def client(hearing: Stack) -> AsyncIterator[GridsieveClient]:
    async with GridsieveClient(hearing.address) as connected:
        yield connected


async def test_answers_about_sounds_and_clips_with_their_sound_are_those_of_transformers_generate(
    hearing: Stack, client: GridsieveClient, omni: Path
) -> None:
    await check_answers("qwen2_5_omni", omni, hearing, client)


async def check_answers(name: str, omni: Path, hearing: Stack, client: GridsieveClient) -> None:
    reference, family = load_reference(name, omni), FAMILIES[name]
    for parts in MIXES:
        inputs = await model_inputs(hearing.addresses["preprocessing"], parts, QUESTION, family, omni, reference.config)
        check_answer(await client.ask(list(parts), QUESTION, **GREEDY), reference, inputs)


async def test_a_pruned_clip_keeps_its_whole_sound_and_obeys_the_law(
    hearing: Stack, client: GridsieveClient, omni: Path
) -> None:
    await check_pruned("qwen2_5_omni", omni, hearing, client)


async def check_pruned(name: str, omni: Path, hearing: Stack, client: GridsieveClient) -> None:
    """Asks twice, because the second answer comes from the prefix cache."""
    reference, family = load_reference(name, omni), FAMILIES[name]
    preprocessing, encoder = hearing.addresses["preprocessing"], hearing.addresses["encoder"]
    for pruning in (Pruning(0.75, "evs"), Pruning(0.5, "pixel_change"), Pruning(0.0, "pixel_change", threshold=0.1)):
        parts = (Video(data=SPOKEN, fps=2, audio=True, pruning=pruning), PICTURE, Audio(data=BELL))
        encoded = await encode(encoder, parts)
        inputs = await model_inputs(preprocessing, parts, QUESTION, family, omni, reference.config)
        video, heard, *_ = encoded
        assert video.kept.size < video.plan.grid.tokens
        assert [each.plan.modality for each in encoded] == [Modality(n) for n in ("video", "audio", "image", "audio")]
        for again in (False, True):
            answer = await client.ask(list(parts), QUESTION, **GREEDY)
            check_gathered(answer, reference, inputs, encoded)
            assert answer.usage.media[1].num_kept == heard.plan.grid.tokens
            assert not again or answer.usage.cached_prompt_tokens > answer.usage.prompt_tokens // 2


def levels_of(
    inputs_embeds: torch.Tensor, visual_pos_masks: Any = None, deepstack_visual_embeds: Any = None, **_: Any
) -> list[torch.Tensor]:
    """The embeddings that a language model is given, [N, D], and those that it adds after each of its first layers."""
    levels = [inputs_embeds[0]]
    for each in deepstack_visual_embeds or ():
        levels.append(torch.zeros_like(levels[0]))
        levels[-1][visual_pos_masks[0]] = each
    return levels


@torch.no_grad()
def check_gathered(answer: Answer, model: Any, inputs: dict[str, Any], encoded: Sequence[Encoded]) -> None:
    """Compares an answer with one forward of the language model over what is kept of transformers' own sequence.

    Of a video whose tokens were chosen before the tower, the encoder's embeddings are taken.
    """
    given: list[torch.Tensor] = []
    text = model.model.language_model
    hook = text.register_forward_pre_hook(lambda *call: given.extend(levels_of(**call[2])), with_kwargs=True)
    model(**inputs)
    hook.remove()
    taken = np.ones(inputs["input_ids"].shape[1], bool)
    for each in encoded:
        places = np.concatenate([np.arange(run.offset, run.end) for run in each.plan.runs])
        taken[np.delete(places, each.kept)] = False
        for level, own in zip(given, torch.from_numpy(each.values.copy()), strict=True):
            if each.pruning.method == "pixel_change":
                level[places[each.kept]] = own
            torch.testing.assert_close(own, level[places[each.kept]], atol=1e-5, rtol=0)
    positions, delta = model.get_rope_index(
        inputs["input_ids"],
        inputs["image_grid_thw"],
        inputs["video_grid_thw"],
        inputs["attention_mask"],
        True,
        inputs["feature_attention_mask"].sum(-1),
        inputs["video_second_per_grid"],
    )
    said = torch.tensor(answer.token_ids)
    answered = text.get_input_embeddings()(said[:-1])
    embeds = torch.cat([given[0][torch.from_numpy(taken)], answered])
    following = torch.arange(len(taken), len(taken) + len(said) - 1) + delta[0]
    axes = torch.cat([positions[:, 0, torch.from_numpy(taken)], following.expand(3, -1)], dim=1)
    mask = torch.ones(1, len(embeds), dtype=torch.long)
    deeper = [torch.cat([level[torch.from_numpy(taken)], torch.zeros_like(answered)]) for level in given[1:]]
    stacked = {"visual_pos_masks": mask.bool(), "deepstack_visual_embeds": deeper} if deeper else {}
    positioned = {"position_ids": axes[:, None], "attention_mask": mask}
    states = text(inputs_embeds=embeds[None], **positioned, **stacked).last_hidden_state[0]
    logprobs = model.lm_head(states[-len(said) :]).log_softmax(dim=-1)
    assert answer.logprobs == pytest.approx(logprobs.gather(1, said[:, None])[:, 0].tolist(), abs=1e-4)
    assert said.tolist() == logprobs.argmax(dim=-1).tolist()


async def test_another_sound_gives_another_answer_and_the_usage_tells_what_was_heard(client: GridsieveClient) -> None:
    other = media.with_sound(FILM, media.chirp(2.3, seed=9))
    clips = [Video(data=SPOKEN, audio=True), Video(data=other, audio=True), Video(data=SPOKEN)]
    answers = [await client.ask(each, QUESTION, **GREEDY) for each in clips]
    logprobs = [answer.logprobs for answer in answers]
    assert all(abs(a[0] - b[0]) > 0.001 for a, b in zip(logprobs, [*logprobs[1:], logprobs[0]], strict=True))
    assert [(item.modality, round(item.heard_s, 6)) for item in answers[0].usage.media] == [
        (Modality.VIDEO, 0),
        (Modality.AUDIO, 2.3),
    ]


async def test_only_the_part_of_the_clip_is_heard(client: GridsieveClient) -> None:
    """The track begins before the part and goes on after it; from 3 s on there are pictures alone."""
    (_, sound) = (await client.ask(Video(data=SUNG, audio=True, start_s=1, end_s=2.5), QUESTION, **GREEDY)).usage.media
    assert sound.heard_s == pytest.approx(1.5)
    (alone,) = (await client.ask(Audio(data=SUNG, start_s=0.25), QUESTION, **GREEDY)).usage.media
    assert alone.heard_s == pytest.approx(4.85)


@pytest.mark.parametrize(
    ("part", "field", "message"),
    [
        (Video(data=FILM, audio=True), "video.audio", "is not possible: the file has no sound track"),
        (Audio(data=FILM), "audio", "is not possible: the file has no sound track"),
        (Video(data=media.picture(64, 64), audio=True), "video.audio", "is for videos, the file is an image"),
        (Audio(data=media.sound(media.chirp(12.5))), "audio", r"lasts 12\.500 s, this model hears at most 12 s"),
        (
            Video(data=media.with_sound(FILM, media.chirp(12.5)), audio=True),
            "video.audio",
            r"lasts 12\.500 s, this model hears at most 12 s; set frame_sampling.start_s and frame_sampling.end_s",
        ),
        (Audio(data=media.sound(media.chirp(0.01))), "audio", r"has 0\.010 s of sound from 0 s on, too little"),
        (Video(data=SPOKEN, audio=True, start_s=3), "video.audio", r"has 0\.000 s of sound from 3 s on, too little"),
    ],
)
async def test_what_cannot_be_heard_is_refused_by_name(
    client: GridsieveClient, part: Part, field: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message) as refused:
        await client.ask(part, QUESTION)
    assert refused.value.field == f"prompt.messages[0].parts[0].{field}"


async def test_models_without_sound_refuse_it_by_name(stack: Stack) -> None:
    async with GridsieveClient(stack.address) as client:
        for part, field in ((Video(data=SPOKEN, audio=True), "video.audio"), (Audio(data=BELL), "audio")):
            with pytest.raises(InvalidRequest, match="this model takes images and videos only") as refused:
                await client.ask(part, QUESTION)
            assert refused.value.field == f"prompt.messages[0].parts[0].{field}"


# --- over HTTP ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def http(hearing: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("gateway")
    with gateway(hearing.address, folder, "--encoder", hearing.addresses["encoder"]) as found, found.http() as client:
        yield client


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


ENCODED = data_url("video/x-matroska", SPOKEN)
INPUT_AUDIO = {"type": "input_audio", "input_audio": {"data": b64(BELL), "format": "wav"}}
AUDIO_URL = {"type": "audio_url", "audio_url": {"url": data_url("audio/wav", BELL)}}


async def test_sounds_and_clips_with_their_sound_arrive_over_http_as_over_grpc(
    http: httpx.Client, client: GridsieveClient
) -> None:
    in_video = {"mm_processor_kwargs": {"use_audio_in_video": True}}
    cut, end = {"mm_processor_kwargs": {"video_start": 0.25, "video_end": 1.0}}, {"video_end": 1.0}
    bodies: list[tuple[dict[str, Any], Part]] = [
        (question(INPUT_AUDIO, QUESTION), Audio(data=BELL)),
        (question(AUDIO_URL, QUESTION), Audio(data=BELL)),
        (question({**AUDIO_URL, "audio_url": AUDIO_URL["audio_url"]["url"]}, QUESTION), Audio(data=BELL)),  # type: ignore[index]
        (question(AUDIO_URL | cut, QUESTION), Audio(data=BELL, start_s=0.25, end_s=1)),
        (
            question(INPUT_AUDIO | {"mm_processor_kwargs": {"video_start": 0.5}}, QUESTION, mm_processor_kwargs=end),
            Audio(data=BELL, start_s=0.5, end_s=1),
        ),
        (question(video(ENCODED, audio=True), QUESTION), Video(data=SPOKEN, audio=True)),
        (question(video(ENCODED, **in_video), QUESTION), Video(data=SPOKEN, audio=True)),
        (question(video(ENCODED), QUESTION, **in_video), Video(data=SPOKEN, audio=True)),
        (question(video(ENCODED, audio=False), QUESTION, **in_video), Video(data=SPOKEN)),
    ]
    for body, part in bodies:
        told = http.post("/v1/chat/completions", json=body | {"logprobs": True}).raise_for_status().json()
        answer = await client.ask(part, QUESTION, **GREEDY)
        said = [each["logprob"] for each in told["choices"][0]["logprobs"]["content"]]
        assert said == pytest.approx(list(answer.logprobs), abs=1e-5)
        heard = [(each["modality"], each["heard_s"]) for each in told["usage"]["gridsieve"]["media"]]
        assert heard == [(each.modality.value, each.heard_s) for each in answer.usage.media]
    greedy = {"temperature": 0, "max_output_tokens": 8, "include": ["message.output_text.logprobs"]}
    for given, part in (
        (INPUT_AUDIO | cut, Audio(data=BELL, start_s=0.25, end_s=1)),
        ({"type": "input_video", "video_url": ENCODED, "audio": True}, Video(data=SPOKEN, audio=True)),
    ):
        asked = {"input": [{"role": "user", "content": [given, {"type": "input_text", "text": QUESTION}]}]}
        told = http.post("/v1/responses", json=asked | greedy).raise_for_status().json()
        answer = await client.ask(part, QUESTION, **GREEDY)
        said = [each["logprob"] for each in told["output"][0]["content"][0]["logprobs"]]
        assert said == pytest.approx(list(answer.logprobs), abs=1e-5)


async def test_refusals_over_http_name_the_fields_of_the_body(http: httpx.Client) -> None:
    silent, in_video = data_url("video/mp4", FILM), {"mm_processor_kwargs": {"use_audio_in_video": True}}
    frames = data_url("video/jpeg", media.picture(56, 56))
    own, of_all = "messages[0].content[0].audio", "mm_processor_kwargs.use_audio_in_video"
    cases = [
        (question(video(silent, audio=True), "?"), own, f"{own} is not possible: the file has no sound track"),
        (question(video(silent), "?", **in_video), of_all, f"{of_all} is not possible: the file has no sound track"),
        (question(video(frames, audio=True), "?"), own, f"{own} is for video files, got the frames of a video"),
        (
            question({**INPUT_AUDIO, "input_audio": {"data": "?"}}, "?"),
            "messages[0].content[0].input_audio.data",
            "must be base64",
        ),
        (
            question({**AUDIO_URL, "audio_url": {"url": silent}}, "?"),
            "messages[0].content[0].audio_url.url",
            "the file has no sound track",
        ),
        (
            question(INPUT_AUDIO | {"mm_processor_kwargs": {"video_start": -1}}, "?"),
            "messages[0].content[0].mm_processor_kwargs.video_start",
            "must be",
        ),
        (
            question({**INPUT_AUDIO, "input_audio": {"data": b64(media.sound(media.chirp(12.5)))}}, "?"),
            "messages[0].content[0].input_audio.data",
            "set mm_processor_kwargs.video_start and mm_processor_kwargs.video_end",
        ),
    ]
    for body, field, message in cases:
        error = http.post("/v1/chat/completions", json=body).json()["error"]
        assert (error["param"], message in error["message"]) == (field, True), error
    said = {"input": [{"role": "user", "content": [{**INPUT_AUDIO, "input_audio": {"data": "?"}}]}]}
    error = http.post("/v1/responses", json=said).json()["error"]
    assert (error["param"], "must be base64" in error["message"]) == ("input[0].content[0].input_audio.data", True)


def test_the_commands_hear_clips_and_sounds(hearing: Stack, http: httpx.Client, tmp_path: Path) -> None:
    talk, bell = tmp_path / "talk.mkv", tmp_path / "bell.wav"
    talk.write_bytes(SPOKEN)
    bell.write_bytes(BELL)
    flags = ["--audio", "--max-new-tokens", "1", "--json", "--server", hearing.address]
    told = CliRunner().invoke(app, ["ask", str(talk), str(bell), QUESTION, *flags])
    assert told.exit_code == 0, told.output
    assert [each["modality"] for each in json.loads(told.stdout)["usage"]["media"]] == ["video", "audio", "audio"]
    output = str(tmp_path / "answers.jsonl")
    asked = ["batch", "--folder", str(tmp_path), "-q", QUESTION, "--max-new-tokens", "1", "--ordered", "-o", output]
    told = CliRunner().invoke(app, [*asked, "--gateway", str(http.base_url)])
    assert told.exit_code == 0, told.output
    sound, _ = (json.loads(row) for row in Path(output).read_text().splitlines())
    (item,) = sound["response"]["body"]["usage"]["gridsieve"]["media"]
    assert (sound["custom_id"], item["heard_s"]) == ("bell.wav", pytest.approx(1.2))
    part = ["--start-s", "0.25", "--end-s", "1", "--max-new-tokens", "1", "--json", "--server", hearing.address]
    told = CliRunner().invoke(app, ["ask", str(bell), QUESTION, *part])
    assert json.loads(told.stdout)["usage"]["media"][0]["heard_s"] == pytest.approx(0.75)
