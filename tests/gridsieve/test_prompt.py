"""Media, embeddings and options as protobuf requests, and the values that no request can express."""

from __future__ import annotations

import re
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gridsieve import Audio, Embeds, Frames, Grid, Image, Message, Pruning, Text, Video
from gridsieve.client.messages import generate_request
from gridsieve.client.prompt import Options, user_turn
from gridsieve.common.contract import errors
from gridsieve.v1 import prompt_pb2, tensor_pb2
from gridsieve.v1.generation_pb2 import Sampling

MIB = 2**20
GRID = Grid(1, 1, 2)
ROWS = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32)


def parts_of(media: Any, question: str = "?") -> Any:
    (message,) = generate_request([user_turn(media, question)], {}).prompt.messages
    return message.parts


def sent(part: Image | Video) -> prompt_pb2.Media:
    """The part as it is in a prompt."""
    (message,) = generate_request([Message("user", (part,))], {}).prompt.messages
    return message.parts[0].image if isinstance(part, Image) else message.parts[0].video


def rejected(message: str) -> Any:
    return pytest.raises(errors.InvalidRequest, match=message)


# --- media ------------------------------------------------------------------------------------------------------


def test_media_precede_the_question_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "http:").mkdir()
    (tmp_path / "http:" / "clip.mp4").write_bytes(b"clip")  # looks like a URL but is a path
    (tmp_path / "photo.PNG").write_bytes(b"photo")
    monkeypatch.chdir(tmp_path)
    media = ["http:/clip.mp4", tmp_path / "photo.PNG", Text("and"), Video(server_path="films/a.mp4")]
    clip, photo, text, film, question = parts_of(media, "What differs?")
    assert (clip.video.data, photo.video.data, text.text) == (b"clip", b"photo", "and")
    assert (film.video.path, question.text) == ("films/a.mp4", "What differs?")
    assert [part.text for part in parts_of(None, "Hello?")] == ["Hello?"]


def test_sounds_and_the_wish_to_hear_a_video_are_sent(tmp_path: Path) -> None:
    (tmp_path / "bell.wav").write_bytes(b"bell")
    media = [
        Audio(tmp_path / "bell.wav", start_s=1, end_s=2.5),
        Audio(url="https://a.test/b.mp3"),
        Video(data=b"v", audio=True),
    ]
    own, fetched, clip, _ = parts_of(media)
    assert (own.audio.data, own.audio.frame_sampling.start_s, own.audio.frame_sampling.end_s) == (b"bell", 1, 2.5)
    assert (fetched.audio.url, clip.video.audio) == ("https://a.test/b.mp3", True)
    with rejected("Audio needs exactly one of path, data, server_path and url, got none"):
        Audio()


@pytest.mark.parametrize("location", ["HTTPS://a.test/clip", "FILE:///a/photo.jpg", "data:image/png;base64,AAAA"])
def test_a_url_is_sent_as_it_is(location: str) -> None:
    assert parts_of(location)[0].video.url == location


def test_sampling_options_and_pruning_of_a_video_are_sent_and_unset_ones_are_not() -> None:
    video = sent(Video(url="http://a.test/y", fps=4, max_frames=8, start_s=0.0, pruning=Pruning(0.5, "random", seed=0)))
    sampling = video.frame_sampling
    assert (sampling.fps, sampling.max_frames) == (4, 8)
    assert (sampling.HasField("start_s"), sampling.HasField("end_s")) == (True, False)
    assert (video.pruning.rate, video.pruning.method, video.pruning.HasField("seed")) == (0.5, "random", True)
    image = sent(Image(url="https://a.test/x?sig=%2F", max_pixels=784))
    assert (image.url, image.frame_sampling.max_pixels) == ("https://a.test/x?sig=%2F", 784)


@pytest.mark.parametrize("sources", [{}, {"data": b"x", "server_path": "a"}])
def test_media_without_exactly_one_source_are_rejected(sources: dict[str, Any]) -> None:
    with rejected("Video needs exactly one of path, data, server_path, url, frames and embeds"):
        Video(**sources)
    with rejected("Image needs exactly one of path, data, server_path, url and embeds"):
        Image(**sources)


def test_pictures_of_a_video_are_sent_with_their_times_and_choices_of_frames() -> None:
    frames = Frames(pictures=(b"first", b"second"), timestamps_s=(1.5, 2))
    video = sent(Video(frames=frames, num_frames=2, frame_indices=(0, 1)))
    assert list(video.frames.pictures) == [b"first", b"second"]
    assert list(video.frames.timestamps_s) == [1.5, 2.0]
    assert (video.frame_sampling.num_frames, list(video.frame_sampling.frame_indices)) == (2, [0, 1])
    plain = sent(Video(frames=frames)).frame_sampling
    assert (plain.HasField("num_frames"), list(plain.frame_indices)) == (False, [])


# --- options ----------------------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "max_new_tokens": 60, "temperature": 0.0, "top_p": 0.25, "top_k": 0, "seed": 0, "stop": ["x", "y"],
    "logprobs": True,
    "min_p": 0.0, "repetition_penalty": 1.5, "presence_penalty": 0.0, "frequency_penalty": -2.0,
    "top_logprobs": 20, "stop_token_ids": (5, 6), "n": 1, "ignore_eos": True, "json_schema": "{}",
    "min_new_tokens": 9, "logit_bias": {5: -100.0, 0: 0.5}, "bad_words": ["x"], "max_thinking_tokens": 0,
    "attention": True,
}  # fmt: skip


def test_every_option_is_sent_and_missing_or_none_leaves_its_field_unset() -> None:
    # Two exclude json_schema.
    assert {*OPTIONS, "json_object", "moments"} == set(Sampling.DESCRIPTOR.fields_by_name)
    asked = generate_request([], Options(**OPTIONS, pruning_rate=0.75, request_id="mine", adapter=""))  # type: ignore[typeddict-item]
    assert asked.sampling == Sampling(**OPTIONS)
    assert (asked.pruning.rate, asked.request_id, asked.HasField("adapter")) == (0.75, "mine", True)
    plain = generate_request([], dict.fromkeys([*OPTIONS, "adapter", "pruning_rate"]))  # type: ignore[arg-type]
    assert plain.sampling == Sampling()
    assert (plain.pruning.rate, plain.HasField("adapter")) == (0, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop": "word"}, "stop must be a sequence of strings, got 'word'"),
        (
            {"logit_bias": {2**40: 1.0}},
            "sampling.logit_bias must be a mapping of 32-bit integers to 64-bit floats, got {1099511627776: 1.0}",
        ),
        ({"top_k": 2**40}, "sampling.top_k must be a 32-bit integer, got 1099511627776"),
        ({"temperature": 10**400}, "sampling.temperature must be a 64-bit float, got 1000"),
        ({"stop": ["\udcff"]}, r"sampling.stop must be text in Unicode, got ['\udcff']"),
        ({"adapter": "\udcff"}, r"adapter must be text in Unicode, got '\udcff'"),
    ],
)
def test_an_option_that_its_field_cannot_hold_is_rejected_by_name(options: Any, message: str) -> None:
    with rejected(re.escape(message)):
        generate_request([user_turn(None, "?")], options)


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="unknown option 'fps'"):
        generate_request([user_turn(None, "?")], {"fps": 2.0})  # type: ignore[typeddict-unknown-key]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (Text("What\udcff"), r"text must be text in Unicode, got 'What\udcff'"),
        (Video(data=b"", max_frames=2**33), "video.frame_sampling.max_frames must be a 32-bit integer, got 8589934592"),
        (
            Video(data=b"", frame_indices=(2**31,)),
            "video.frame_sampling.frame_indices must be a 32-bit integer, got (2147483648,)",
        ),
        (Video(server_path="\udcff"), "video.path must be text in Unicode"),
        (
            Video(embeds=Embeds(b"", Grid(1, 1, 1), dtype="float32", shape=(2**70, 1))),
            "video.embeds.tensor.shape must be a",
        ),
    ],
)
def test_a_part_that_its_field_cannot_hold_is_rejected_by_name(part: Any, message: str) -> None:
    with rejected(re.escape(f"prompt.messages[0].parts[0].{message}")):
        generate_request([Message("user", (part,))], {})


# --- embeddings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "dtype", "data"),
    [
        (ROWS, tensor_pb2.DTYPE_FLOAT32, struct.pack("<6f", 1, 2, 3, 4, 5, 6)),
        (ROWS.astype(">f2"), tensor_pb2.DTYPE_FLOAT16, struct.pack("<6e", 1, 2, 3, 4, 5, 6)),
        (ROWS[::-1, ::2], tensor_pb2.DTYPE_FLOAT32, struct.pack("<4f", 4, 6, 1, 3)),
    ],
    ids=["float32", "big-endian float16", "view"],
)
def test_an_array_is_sent_little_endian_and_in_c_order(values: Any, dtype: int, data: bytes) -> None:
    media = sent(Image(embeds=Embeds(values, GRID)))
    tensor = media.embeds.tensor
    assert (tensor.dtype, tensor.data, list(tensor.shape)) == (dtype, data, [1, *values.shape])
    assert not media.HasField("frame_sampling")
    levels = sent(Image(embeds=Embeds(np.stack([values, values]), GRID))).embeds.tensor
    assert (levels.data, list(levels.shape)) == (2 * data, [2, *values.shape])


@pytest.mark.parametrize(
    ("seconds", "numerator", "denominator"),
    [(0.1, 1, 10), (Fraction(1001, 15000), 1001, 15000), (np.float32(0.3), 3, 10)],
)
def test_seconds_per_slice_are_exact_and_floats_are_read_as_their_shortest_decimal(
    seconds: Any, numerator: int, denominator: int
) -> None:
    embeds = sent(Video(embeds=Embeds(ROWS, GRID, seconds_per_slice=seconds))).embeds
    assert embeds.seconds_per_grid == prompt_pb2.Rational(numerator=numerator, denominator=denominator)
    assert not embeds.timestamps_s


def test_embeddings_of_a_video_may_have_timestamps_and_a_pruning() -> None:
    media = sent(Video(embeds=Embeds(ROWS, Grid(2, 1, 1), timestamps_s=(0.25, 1.75)), pruning=Pruning(0.5, "vidcom2")))
    grid = media.embeds.grid
    assert (grid.t, grid.h, grid.w, list(media.embeds.timestamps_s)) == (2, 1, 1, [0.25, 1.75])
    assert (media.pruning.rate, media.pruning.method) == (0.5, "vidcom2")


@pytest.mark.parametrize(
    ("values", "more", "message"),
    [
        (ROWS.astype(np.float64), {}, "must be float16, bfloat16, float32, got float64"),
        (ROWS[0], {}, r"\[tokens, D\] or \[1 \+ levels, tokens, D\], got \[3\]"),
        (torch.tensor(ROWS), {}, "must be a numpy array or bytes, got Tensor"),
        (b"12", {"dtype": "bfloat16"}, "Embeds.shape must be set"),
        (b"12", {"dtype": "float8", "shape": (1, 2)}, "got float8"),
        (ROWS, {"shape": (2, 3)}, "Embeds.shape must be set if values are bytes"),
    ],
)
def test_values_of_another_type_or_shape_are_rejected(values: Any, more: dict[str, Any], message: str) -> None:
    with rejected(message):
        Embeds(values, GRID, **more)


@pytest.mark.parametrize("seconds", [float("nan"), Fraction(1, 2**63), 1e20])
def test_a_step_that_is_no_quotient_of_64_bit_integers_is_rejected(seconds: Any) -> None:
    with rejected("embeds.seconds_per_grid must be a quotient of two 64-bit integers"):
        sent(Video(embeds=Embeds(ROWS, GRID, seconds_per_slice=seconds)))


def test_options_about_frames_are_rejected_with_embeddings() -> None:
    embeds = Embeds(ROWS, GRID, seconds_per_slice=1)
    for field in ("fps", "min_frames", "max_frames", "max_pixels", "start_s", "end_s"):
        with rejected(rf"Video\.{field} must not be set with embeds"):
            Video(embeds=embeds, **{field: 0})  # type: ignore[arg-type]
    with rejected(r"Image\.max_pixels must not be set with embeds"):
        Image(embeds=embeds, max_pixels=784)


def test_embeddings_files_and_urls_share_a_limit_that_no_service_exceeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remedy = r"give larger files as Video\(url=…\), .* below preprocessing's --media-root, .* /v1/files$"
    monkeypatch.setattr("gridsieve.client.messages.GREATEST_INLINE_BYTES", MIB)
    (tmp_path / "clip.mp4").write_bytes(bytes(MIB // 2 + 1))
    rows = np.zeros((2**7, 2**10), dtype=np.float32)
    half = Video(embeds=Embeds(rows, Grid(1, 8, 16), seconds_per_slice=1))
    fits = Image(data=bytes(MIB // 2))
    assert generate_request([Message("user", (fits, half))], {}).prompt.ByteSize() > MIB
    for part, named in (
        (Video(tmp_path / "clip.mp4"), "clip.mp4"),
        (Image(data=bytes(MIB // 2 + 1)), "Image.data"),
        (Video(url="data:," + "x" * (MIB // 2)), "Video.url"),
    ):
        with rejected(rf"{named} has 0.5 MiB, a request carries at most 1 MiB of media \(0.5 MiB are left\); {remedy}"):
            generate_request([Message("user", (half, part))], {})
