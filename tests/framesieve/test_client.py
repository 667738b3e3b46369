"""What the client sends of a question, and what it makes of the answer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import PIL.Image
import pytest

from common.channels import REQUEST_ID_KEY
from framesieve import Accepted, Delta, Finished, FinishReason, Image, Message, Progress, Pruning, Text, Video
from framesieve.client.prompt import IMAGE_SUFFIXES
from framesieve.v1 import generation_pb2, prompt_pb2
from services.preprocessing.video import pictures
from tests.framesieve.generation_stand_in import moving_ball, served


async def test_the_answer_is_its_deltas_joined_with_usage_and_timings(tmp_path: Path) -> None:
    async with served(tmp_path, moving_ball) as (client, _):
        answer = await client.ask(Video(data=b"film"), "What moves?", logprobs=True)
    assert str(answer) == answer.text == "A ball"
    assert answer.request_id == "r1"
    assert answer.token_ids == (5, 6)
    assert answer.logprobs == (-0.5, -0.25)
    assert answer.reason is FinishReason.STOP
    assert (answer.usage.prompt_tokens_full, answer.usage.prompt_tokens, answer.usage.completion_tokens) == (100, 30, 2)
    (media,) = answer.usage.media
    assert (media.grid.t, media.grid.h, media.grid.w, media.kept_tokens) == (4, 5, 4, 20)
    assert media.repaired_frames == 1
    assert media.first_slice_only
    assert answer.timings.stages_s == {
        "fetch": 0.0, "plan": 0.25, "decode": 0.5, "resize": 0.0, "wait_for_encoder": 0.0,
        "encode": 0.0, "prune": 0.0, "transfer": 0.0, "wait_for_prefill": 0.0, "prefill": 0.0,
    }  # fmt: skip
    assert sum(answer.timings.stages_s.values()) == answer.timings.time_to_first_token_s
    assert answer.timings.tokens_per_second(completion_tokens=2) == 1 / 0.5


async def test_events_come_typed_and_in_their_order(tmp_path: Path) -> None:
    async with served(tmp_path, moving_ball) as (client, _):
        events = [event async for event in client.stream(Video(data=b"film"), "What moves?")]
    assert [type(event) for event in events] == [Accepted, Progress, Delta, Delta, Finished]
    assert events[1] == Progress(media_index=0, decoded_slices=4, encoded_slices=3)


async def test_media_stand_before_the_question_in_the_order_given(tmp_path: Path) -> None:
    clip, photo = tmp_path / "clip.mp4", tmp_path / "photo.PNG"
    clip.write_bytes(b"clip")
    photo.write_bytes(b"photo")
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask([clip, str(photo), Text("and"), Video(server_path="films/a.mp4")], "What differs?")
    (message,) = fake.requests[0].prompt.messages
    assert message.role == prompt_pb2.ROLE_USER
    assert [part.WhichOneof("content") for part in message.parts] == ["video", "image", "text", "video", "text"]
    assert message.parts[0].video.data == b"clip"
    assert message.parts[1].image.data == b"photo"
    assert message.parts[3].video.path == "films/a.mp4"
    assert message.parts[4].text == "What differs?"


async def test_a_url_is_sent_as_it_stands_with_what_is_to_be_looked_at(tmp_path: Path) -> None:
    parts = [Image(url="https://a.test/x?sig=%2F", max_pixels=784), Video(url="http://a.test/y", fps=4)]
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(parts, "What differs?")
    image, video, _ = fake.requests[0].prompt.messages[0].parts
    assert (image.image.url, image.image.frame_sampling.max_pixels) == ("https://a.test/x?sig=%2F", 784)
    assert (video.video.url, video.video.frame_sampling.fps) == ("http://a.test/y", 4)


@pytest.mark.parametrize(
    ("location", "kind"),
    [
        ("http://a.test/clip.mp4", "video"),
        ("HTTPS://a.test/clip", "video"),
        ("https://a.test/photo.PNG", "image"),
        ("https://a.test/photo%2Ejpg?width=9#there", "image"),
        ("https://a.test/clip.mp4?poster=photo.png", "video"),
        ("https://a.test?x=/photo.png", "video"),
        ("http://[/photo.png", "image"),
        ("data:image/png;base64,AAAA", "image"),
        ("data:video/mp4;base64,AAAA", "video"),
        ("data:,photo.png", "video"),
    ],
)
async def test_what_starts_as_a_url_is_one_and_its_suffix_or_type_decides(
    tmp_path: Path, location: str, kind: str
) -> None:
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(location, "?")
    part = fake.requests[0].prompt.messages[0].parts[0]
    assert part.WhichOneof("content") == kind
    assert getattr(part, kind).url == location


def test_all_that_preprocessing_reads_as_a_picture_is_sent_as_one_unless_it_moves() -> None:
    registered = PIL.Image.registered_extensions()
    read = {suffix for suffix, format_ in registered.items() if format_ in pictures._FORMATS}
    assert read - {".apng", ".avifs"} == IMAGE_SUFFIXES


async def test_a_path_that_only_looks_like_a_url_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "http:").mkdir()
    (tmp_path / "http:" / "clip.mp4").write_bytes(b"clip")
    (tmp_path / "data").write_bytes(b"data")
    monkeypatch.chdir(tmp_path)
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(["http:/clip.mp4", "data"], "?")
    parts = fake.requests[0].prompt.messages[0].parts
    assert [part.video.data for part in parts[:2]] == [b"clip", b"data"]


async def test_earlier_turns_come_first(tmp_path: Path) -> None:
    history = [
        Message("system", (Text("Be brief."),)),
        Message("user", (Image(data=b"photo", max_pixels=784), Text("What is it?"))),
        Message("assistant", (Text("A cat."),)),
    ]
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(None, "What colour?", history=history)
    messages = fake.requests[0].prompt.messages
    roles = [prompt_pb2.ROLE_SYSTEM, prompt_pb2.ROLE_USER, prompt_pb2.ROLE_ASSISTANT, prompt_pb2.ROLE_USER]
    assert [message.role for message in messages] == roles
    assert messages[1].parts[0].image.frame_sampling.max_pixels == 784
    assert [part.text for part in messages[3].parts] == ["What colour?"]


async def test_options_reach_the_service_and_what_is_left_out_stays_unset(tmp_path: Path) -> None:
    video = Video(data=b"film", fps=4, max_frames=8, start_s=0.0, pruning=Pruning(0.5, "random", seed=0))
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(video, "?", pruning_rate=0.75, temperature=0.0, seed=0, stop=["."], request_id="mine")
        await client.ask(video, "?")
    asked, plain = fake.requests
    assert asked.pruning.rate == 0.75
    assert asked.sampling.HasField("temperature")
    assert asked.sampling.HasField("seed")
    assert not asked.sampling.HasField("top_p")
    assert list(asked.sampling.stop) == ["."]
    assert asked.request_id == "mine"
    sampling = asked.prompt.messages[0].parts[0].video.frame_sampling
    assert (sampling.fps, sampling.max_frames, sampling.HasField("start_s"), sampling.HasField("end_s")) == (
        4, 8, True, False,
    )  # fmt: skip
    own = asked.prompt.messages[0].parts[0].video.pruning
    assert (own.rate, own.method, own.HasField("seed")) == (0.5, "random", True)
    assert plain.pruning.rate == 0
    assert plain.sampling == generation_pb2.Sampling()


async def test_the_request_id_is_in_the_metadata_too_so_that_every_log_names_it(tmp_path: Path) -> None:
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(None, "?", request_id="mine")
    assert fake.metadata[REQUEST_ID_KEY] == "mine"


async def test_a_request_id_that_no_metadata_can_carry_is_left_for_the_service_to_refuse(tmp_path: Path) -> None:
    async with served(tmp_path, moving_ball) as (client, fake):
        await client.ask(None, "?", request_id="naïve\n")
    assert fake.requests[0].request_id == "naïve\n"
    assert REQUEST_ID_KEY not in fake.metadata


def test_the_client_needs_no_torch() -> None:
    code = "import sys, framesieve.__main__; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
