"""Embeddings in place of pixels: what of them reaches the wire, and what no request can express."""

from __future__ import annotations

import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.contract import errors
from framesieve import Embeds, Grid, Image, Message, Pruning, Text, Video
from framesieve.cli.inspection import inspect_media
from framesieve.client.messages import prompt_message
from framesieve.v1 import prompt_pb2, tensor_pb2

MIB = 2**20
GRID = Grid(1, 1, 2)
ROWS = np.array([[1, 2, 3], [4, 5, 6]], dtype=np.float32)


def sent(part: Image | Video) -> prompt_pb2.Media:
    """The part as it stands in a prompt."""
    (message,) = prompt_message([Message("user", (part,))]).messages
    return message.parts[0].image if isinstance(part, Image) else message.parts[0].video


def refused(message: str) -> Any:
    return pytest.raises(errors.InvalidRequest, match=message)


@pytest.mark.parametrize(
    ("values", "dtype", "data"),
    [
        (ROWS, tensor_pb2.DTYPE_FLOAT32, struct.pack("<6f", 1, 2, 3, 4, 5, 6)),
        (ROWS.astype(np.float16), tensor_pb2.DTYPE_FLOAT16, struct.pack("<6e", 1, 2, 3, 4, 5, 6)),
        (ROWS.astype(">f4"), tensor_pb2.DTYPE_FLOAT32, struct.pack("<6f", 1, 2, 3, 4, 5, 6)),
        (np.asfortranarray(ROWS), tensor_pb2.DTYPE_FLOAT32, struct.pack("<6f", 1, 2, 3, 4, 5, 6)),
        (ROWS[::-1, ::2], tensor_pb2.DTYPE_FLOAT32, struct.pack("<4f", 4, 6, 1, 3)),
    ],
    ids=["float32", "float16", "big-endian", "in Fortran's order", "a view"],
)
def test_an_array_is_sent_as_its_bytes_little_endian_and_in_c_order(values: Any, dtype: int, data: bytes) -> None:
    tensor = sent(Image(embeds=Embeds(values, GRID))).embeds.tensor
    assert (tensor.dtype, tensor.data, list(tensor.shape)) == (dtype, data, [1, *values.shape])


def test_deepstack_levels_are_the_first_axis() -> None:
    levels = np.stack([ROWS, ROWS + 10, ROWS + 20])
    tensor = sent(Image(embeds=Embeds(levels, GRID))).embeds.tensor
    assert list(tensor.shape) == [3, 2, 3]
    assert struct.unpack("<18f", tensor.data)[6:9] == (11, 12, 13)


def test_bfloat16_is_sent_as_the_bytes_that_a_tower_holds() -> None:
    rows = torch.tensor(ROWS).bfloat16()
    raw = rows.view(torch.uint8).numpy().tobytes()
    tensor = sent(Image(embeds=Embeds(raw, GRID, dtype="bfloat16", shape=rows.shape))).embeds.tensor
    assert (tensor.dtype, list(tensor.shape)) == (tensor_pb2.DTYPE_BFLOAT16, [1, 2, 3])
    assert tensor.data == b"".join(struct.pack(">f", value)[1::-1] for value in range(1, 7))  # a float32's upper half


@pytest.mark.parametrize(
    ("seconds", "numerator", "denominator"),
    [(0.1, 1, 10), (Fraction(1001, 15000), 1001, 15000), (2, 2, 1), (np.float32(0.3), 3, 10)],
)
def test_seconds_per_slice_are_exact_and_a_float_is_read_as_its_shortest_decimal(
    seconds: Any, numerator: int, denominator: int
) -> None:
    embeds = sent(Video(embeds=Embeds(ROWS, GRID, seconds_per_slice=seconds))).embeds
    assert embeds.seconds_per_grid == prompt_pb2.Rational(numerator=numerator, denominator=denominator)
    assert not embeds.timestamps_s


def test_a_video_may_say_when_each_slice_is_shown() -> None:
    embeds = sent(Video(embeds=Embeds(ROWS, Grid(2, 1, 1), timestamps_s=(0.25, 1.75)))).embeds
    assert (embeds.grid.t, embeds.grid.h, embeds.grid.w) == (2, 1, 1)
    assert list(embeds.timestamps_s) == [0.25, 1.75]
    assert not embeds.HasField("seconds_per_grid")


def test_nothing_about_frames_is_said_beside_embeds() -> None:
    assert not sent(Video(embeds=Embeds(ROWS, GRID, seconds_per_slice=1))).HasField("frame_sampling")
    assert not sent(Image(embeds=Embeds(ROWS, GRID))).HasField("frame_sampling")


def test_embeddings_of_a_video_may_have_a_pruning_of_their_own() -> None:
    media = sent(Video(embeds=Embeds(ROWS, GRID, seconds_per_slice=1), pruning=Pruning(0.5, "vidcom2")))
    assert (media.pruning.rate, media.pruning.method) == (0.5, "vidcom2")


def test_earlier_turns_bring_their_media_and_each_its_own_pruning(tmp_path: Path) -> None:
    clip = tmp_path / "clip.mp4"
    clip.write_bytes(b"film")
    tower = Embeds(ROWS, GRID, seconds_per_slice=1)
    turns = [
        Message("user", (Video(clip, pruning=Pruning(0.9)), Text("What moves?"))),
        Message("assistant", (Text("A ball."),)),
        Message("user", (Image(embeds=Embeds(ROWS, GRID)), Video(embeds=tower), Text("And here?"))),
    ]
    first, _, last = prompt_message(turns).messages
    assert (first.parts[0].video.data, first.parts[0].video.pruning.rate) == (b"film", 0.9)
    assert [part.WhichOneof("content") for part in last.parts] == ["image", "video", "text"]
    assert last.parts[1].video.HasField("embeds")
    assert not last.parts[1].video.HasField("pruning")


@pytest.mark.parametrize(
    ("values", "more", "message"),
    [
        (ROWS.astype(np.float64), {}, "must be float16, bfloat16, float32, got float64"),
        (ROWS.astype(np.uint16), {}, "got uint16"),
        (ROWS[0], {}, r"\[tokens, D\] or \[1 \+ levels, tokens, D\], got \[3\]"),
        (ROWS[None, None], {}, r"got \[1, 1, 2, 3\]"),
        (torch.tensor(ROWS), {}, "must be a numpy array or bytes, got Tensor"),
        (b"12", {"dtype": "bfloat16"}, "Embeds.shape must be set"),
        (b"12", {"shape": (1, 1)}, "Embeds.dtype must be set"),
        (b"12", {"dtype": "float8", "shape": (1, 2)}, "got float8"),
        (ROWS, {"dtype": "float32"}, "Embeds.dtype must be set if values are bytes"),
        (ROWS, {"shape": (2, 3)}, "Embeds.shape must be set if values are bytes"),
    ],
)
def test_values_that_are_no_embeddings_are_refused(values: Any, more: dict[str, Any], message: str) -> None:
    with refused(message):
        Embeds(values, GRID, **more)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e-300, Fraction(1, 2**63), 1e20])
def test_a_step_that_no_two_64_bit_integers_make_is_refused(seconds: Any) -> None:
    with refused("Embeds.seconds_per_slice must be a quotient of two 64-bit integers"):
        sent(Video(embeds=Embeds(ROWS, GRID, seconds_per_slice=seconds)))


@pytest.mark.parametrize("field", ["fps", "min_frames", "max_frames", "max_pixels", "start_s", "end_s"])
def test_what_chooses_frames_is_refused_beside_embeds_by_name(field: str) -> None:
    with refused(rf"Video\.{field} must not be set with embeds"):
        Video(embeds=Embeds(ROWS, GRID, seconds_per_slice=1), **{field: 0})  # type: ignore[arg-type]


def test_an_images_pixels_are_not_bounded_where_it_has_none() -> None:
    with refused(r"Image\.max_pixels must not be set with embeds"):
        Image(embeds=Embeds(ROWS, GRID), max_pixels=784)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_embeddings_and_files_share_sixteen_mebibytes(as_bytes: bool) -> None:
    rows = np.zeros((2**12, 2**10 - 1), dtype=np.float32)  # 16 KiB are left
    raw = {"dtype": "float32", "shape": rows.shape} if as_bytes else {}
    video = Video(embeds=Embeds(rows.tobytes() if as_bytes else rows, Grid(1, 64, 64), seconds_per_slice=1, **raw))  # type: ignore[arg-type]
    fits, too_large = Image(data=bytes(2**14)), Image(data=bytes(2**14 + 1))
    assert prompt_message([Message("user", (fits, video))]).ByteSize() > 16 * MIB
    with refused(r"Embeds\.values has 16\.0 MiB, a prompt carries at most 16 MiB of media"):
        prompt_message([Message("user", (too_large, video))])
    with refused(r"Image\.data has 0\.0 MiB"):
        prompt_message([Message("user", (video, too_large))])


async def test_embeddings_cannot_be_drawn() -> None:
    with refused(r"Video\.embeds cannot be drawn"):
        await inspect_media(
            "unix:/nobody", "unix:/nobody", Video(embeds=Embeds(ROWS, GRID, seconds_per_slice=1)), Pruning()
        )
