"""Embeddings in place of pixels are laid out by their grid and time base, and what is wrong with those is refused."""

from __future__ import annotations

import hashlib
import math
import struct
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from common.checkpoint import Checkpoint
from common.contract.errors import InvalidRequest
from common.contract.plan import Grid, MediaPlan, Modality, PromptPlan, Run
from common.contract.wire import PlanReceiver, plan_messages
from framesieve.v1 import prompt_pb2, tensor_pb2
from services.preprocessing.planner import Planner
from services.preprocessing.rpc.messages import MAX_EMBEDS_SLICES, conversation_of
from services.preprocessing.video.timing import MAX_LENGTH_S, TimeBase
from tests.families import FAMILIES
from tests.preprocessing.preprocessing_media import clip, transformers_processor

WEEK = MAX_LENGTH_S
TIMES = {
    "a step": {"seconds_per_grid": prompt_pb2.Rational(numerator=1001, denominator=12000)},
    "times": {"timestamps_s": [0.5, 2.0, 2.5]},
}


@pytest.fixture(scope="module")
def tiny(family_checkpoint: Path) -> Planner:
    """A planner of each family in turn."""
    return Planner(Checkpoint(family_checkpoint), None)


def embeds(t: int, h: int, w: int, data: bytes = b"tower", **fields: Any) -> prompt_pb2.Media:
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, data=data)
    grid = prompt_pb2.Grid(t=t, h=h, w=w)
    return prompt_pb2.Media(embeds=prompt_pb2.MediaEmbeds(tensor=tensor, grid=grid, **fields))


def step(seconds: Fraction) -> prompt_pb2.Rational:
    return prompt_pb2.Rational(numerator=seconds.numerator, denominator=seconds.denominator)


def prompt(**media: prompt_pb2.Media) -> prompt_pb2.Prompt:
    """A user's turn with one `image` or `video`, and a question."""
    parts = [prompt_pb2.Part(**media), prompt_pb2.Part(text="so?")]  # type: ignore[arg-type]
    return prompt_pb2.Prompt(messages=[prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=parts)])


def planned(planner: Planner, **media: prompt_pb2.Media) -> PromptPlan:
    return planner.plan(conversation_of(prompt(**media))).plan


def item_of(planner: Planner, **media: prompt_pb2.Media) -> MediaPlan:
    (item,) = planned(planner, **media).media
    return item


@pytest.mark.parametrize("base", TIMES)
def test_embeddings_have_a_plan_without_frames_that_travels(tiny: Planner, base: str) -> None:
    result = tiny.plan(conversation_of(prompt(video=embeds(3, 2, 4, **TIMES[base]))))
    (item,) = result.plan.media
    assert (item.modality, item.grid, item.brings_embeds) == (Modality.VIDEO, Grid(3, 2, 4), True)
    assert (item.frames, item.frame_height_px, item.frame_width_px, item.timestamps_s) == (0, 0, 0, ())
    assert [list(media.slices()) for media in result.media] == [[]]
    receiver = PlanReceiver()
    (received,) = filter(None, map(receiver.add, plan_messages(result.plan)))
    assert received.media == result.plan.media


def test_an_images_embeddings_have_no_time(tiny: Planner) -> None:
    item = item_of(tiny, image=embeds(1, 3, 5))
    assert (item.modality, item.grid, item.seconds_per_grid) == (Modality.IMAGE, Grid(1, 3, 5), None)
    assert len(item.runs) == 1


def test_a_videos_embeddings_are_laid_out_as_the_video_would_be(tiny: Planner) -> None:
    by_pixels = planned(tiny, video=prompt_pb2.Media(data=clip(60, rate=Fraction(24000, 1001))))
    (item,) = by_pixels.media
    assert item.seconds_per_grid
    slices_s = [(a + b) / 2 for a, b in zip(item.timestamps_s[::2], item.timestamps_s[1::2], strict=True)]
    by_times = planned(tiny, video=embeds(item.grid.t, item.grid.h, item.grid.w, timestamps_s=slices_s))
    assert by_times.input_ids.tolist() == by_pixels.input_ids.tolist()
    assert by_times.media[0].runs == item.runs
    by_step = planned(
        tiny,
        video=embeds(item.grid.t, item.grid.h, item.grid.w, seconds_per_grid=step(item.seconds_per_grid)),
    )
    assert by_step.positions.shape == by_pixels.positions.shape
    assert by_step.media[0].seconds_per_grid == item.seconds_per_grid


@pytest.mark.parametrize("seconds", [Fraction(1), Fraction(1001, 12000), Fraction(1, 3), Fraction(40)])
def test_from_a_step_alone_frames_are_taken_to_stand_evenly(
    family: str, tiny: Planner, family_checkpoint: Path, seconds: Fraction
) -> None:
    known = FAMILIES[family]
    plan = planned(tiny, video=embeds(5, 2, 3, seconds_per_grid=step(seconds)))
    processor = transformers_processor(family, known.merge, known.temporal_patch)
    # Frames 0 to 9 of a video of so many frames a second.
    metadata = SimpleNamespace(fps=float(known.temporal_patch / seconds), frames_indices=np.arange(10))
    grids = torch.tensor([[5, 2 * known.merge, 3 * known.merge]])
    expansion = processor.replace_video_token({"video_grid_thw": grids, "video_metadata": [metadata]}, 0)
    text = f"<|im_start|>user\n<|vision_start|>{expansion}<|vision_end|>so?<|im_end|>\n<|im_start|>assistant\n"
    assert plan.input_ids.tolist() == AutoTokenizer.from_pretrained(family_checkpoint)(text)["input_ids"]


def test_slices_that_stand_alone_tell_the_times_they_came_with(tmp_path: Path) -> None:
    checkpoint = FAMILIES["qwen3_vl"].write(tmp_path / "checkpoint", 1)
    plan = planned(Planner(Checkpoint(checkpoint), None), video=embeds(3, 1, 2, timestamps_s=[0.0, 0.75, 65.25]))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    slices = [
        f"<{seconds} seconds><|vision_start|><|video_pad|><|video_pad|><|vision_end|>"
        for seconds in ("0.0", "0.8", "65.2")
    ]
    text = f"<|im_start|>user\n<|vision_start|>{''.join(slices)}<|vision_end|>so?<|im_end|>\n<|im_start|>assistant\n"
    assert plan.input_ids.tolist() == tokenizer(text)["input_ids"]
    pad = tokenizer.convert_tokens_to_ids("<|video_pad|>")
    places = [place for place, token in enumerate(plan.input_ids.tolist()) if token == pad]
    assert plan.media[0].runs == tuple(Run(place, 2) for place in places[::2])


@pytest.mark.parametrize(
    ("times_s", "seconds"),
    [
        ([0.1, 0.4, 1.3], Fraction(6, 10)),
        ([0.3, 0.4], Fraction(1, 10)),
        ([7.0], Fraction(1)),
        ([0.0, 1e-7], Fraction(1, 10**7)),
    ],
)
def test_times_alone_give_the_mean_step_exactly(tiny: Planner, times_s: list[float], seconds: Fraction) -> None:
    item = item_of(tiny, video=embeds(len(times_s), 1, 1, timestamps_s=times_s))
    assert item.seconds_per_grid == seconds


@given(times_s=st.lists(st.floats(0, WEEK), min_size=2, max_size=40, unique=True).map(sorted))
def test_any_increasing_times_give_a_step_that_travels_and_is_theirs(times_s: list[float]) -> None:
    base = TimeBase.of_slices(times_s)
    mean = (Fraction(str(times_s[-1])) - Fraction(str(times_s[0]))) / (len(times_s) - 1)
    assert base.seconds_per_grid > 0
    assert max(base.seconds_per_grid.numerator, base.seconds_per_grid.denominator) < 2**63
    assert abs(base.seconds_per_grid - mean) <= Fraction(1, 10**12)
    assert base.slices_s == tuple(times_s)


def test_a_frame_that_stands_still_gives_slices_of_one_time(tiny: Planner) -> None:
    """As a recorded screen does on which nothing happens for a while."""
    item = item_of(tiny, video=embeds(3, 1, 1, timestamps_s=[0.5, 0.5, 0.5]))
    assert item.seconds_per_grid is not None
    assert item.seconds_per_grid > 0


def test_no_time_is_shown_as_less_than_nothing() -> None:
    assert [str(time) for time in TimeBase.of_slices([-0.0, 1.0]).slices_s] == ["0.0", "1.0"]


def test_positions_scale_with_the_mean_step_where_time_is_in_positions(tiny_checkpoint: Path) -> None:
    plan = planned(Planner(Checkpoint(tiny_checkpoint), None), video=embeds(3, 1, 1, timestamps_s=[0.5, 2.0, 4.5]))
    (run,) = plan.media[0].runs
    # 2 s a slice, at the tiny checkpoint's 2 tokens a second.
    assert plan.positions[0, run.offset : run.end].tolist() == [run.offset, run.offset + 4, run.offset + 8]


def test_different_embeddings_grids_and_time_bases_have_different_hashes(tiny: Planner) -> None:
    second = {"seconds_per_grid": step(Fraction(1))}
    looks = [
        embeds(4, 2, 3, **second),
        embeds(4, 2, 3, b"other", **second),
        embeds(4, 3, 2, **second),
        embeds(2, 4, 3, **second),
        embeds(4, 2, 3, seconds_per_grid=step(Fraction(1, 2))),
        embeds(4, 2, 3, timestamps_s=[0, 1, 2, 3]),
        embeds(4, 2, 3, timestamps_s=[0, 1.5, 2, 3]),
        embeds(4, 2, 3, timestamps_s=[1, 2, 3, 4]),
    ]
    hashes = [item_of(tiny, video=look).content_hash for look in looks]
    as_image, as_video = item_of(tiny, image=embeds(1, 2, 3)), item_of(tiny, video=embeds(1, 2, 3, **second))
    assert len({*hashes, as_image.content_hash, as_video.content_hash}) == len(looks) + 2


def test_a_digest_stands_for_the_tensor_that_was_left_out(tiny: Planner) -> None:
    digest = hashlib.sha256(struct.pack("<i", tensor_pb2.DTYPE_FLOAT32) + b"tower").digest()
    whole, left_out = embeds(1, 2, 2), embeds(1, 2, 2, b"", digest=digest)
    assert item_of(tiny, image=whole).content_hash == item_of(tiny, image=left_out).content_hash
    other = embeds(1, 2, 2, b"", digest=bytes(32))
    halves = embeds(1, 2, 2)
    halves.embeds.tensor.dtype = tensor_pb2.DTYPE_BFLOAT16
    assert item_of(tiny, image=halves).content_hash != item_of(tiny, image=whole).content_hash
    assert item_of(tiny, image=other).content_hash != item_of(tiny, image=whole).content_hash


def without_grid() -> prompt_pb2.Media:
    return prompt_pb2.Media(embeds=prompt_pb2.MediaEmbeds(seconds_per_grid=step(Fraction(1))))


def with_frame_sampling() -> prompt_pb2.Media:
    media = embeds(2, 2, 2, **TIMES["a step"])
    media.frame_sampling.CopyFrom(prompt_pb2.FrameSampling(max_pixels=4096))
    return media


@pytest.mark.parametrize(
    ("media", "named"),
    [
        ({"video": embeds(2, 2, 2)}, r"video\.embeds\.seconds_per_grid or timestamps_s must be set: a video needs"),
        (
            {"video": embeds(3, 2, 2, **TIMES["a step"], **TIMES["times"])},
            r"video\.embeds\.seconds_per_grid and timestamps_s are two time bases",
        ),
        (
            {"image": embeds(1, 2, 2, **TIMES["a step"])},
            r"image\.embeds\.seconds_per_grid and timestamps_s are for vid",
        ),
        ({"image": embeds(1, 2, 2, timestamps_s=[0.0])}, r"image\.embeds\.seconds_per_grid and timestamps_s are for"),
        ({"image": embeds(2, 2, 2)}, r"image\.embeds\.grid\.t of an image must be 1, got 2"),
        ({"video": without_grid()}, r"video\.embeds\.grid must be set"),
        ({"video": embeds(2, 0, 2, **TIMES["a step"])}, r"video\.embeds\.grid is invalid: .* got 2×0×2"),
        ({"video": embeds(2, 2**20, 2**20, **TIMES["a step"])}, r"video\.embeds\.grid is invalid: .* at most 4194304"),
        (
            {"video": embeds(2, 2, 2, seconds_per_grid=prompt_pb2.Rational(numerator=1))},
            r"video\.embeds\.seconds_per_grid\.denominator must be at least 1, got 0",
        ),
        (
            {"video": embeds(2, 2, 2, seconds_per_grid=prompt_pb2.Rational(numerator=1, denominator=-2))},
            r"video\.embeds\.seconds_per_grid\.denominator must be at least 1, got -2",
        ),
        (
            {"video": embeds(2, 2, 2, seconds_per_grid=prompt_pb2.Rational(denominator=1))},
            r"video\.embeds\.seconds_per_grid must be above 0, got 0",
        ),
        (
            {"video": embeds(2, 2, 2, seconds_per_grid=step(Fraction(-1, 2)))},
            r"video\.embeds\.seconds_per_grid must be above 0, got -1/2",
        ),
        (
            {"video": embeds(2, 2, 2, seconds_per_grid=step(Fraction(WEEK)))},
            r"video\.embeds\.seconds_per_grid makes the video last 1209600 s, at most 604800",
        ),
        (
            {"video": embeds(2, 2, 2, **TIMES["times"])},
            r"video\.embeds\.timestamps_s must hold one time for each of 2 slices, got 3",
        ),
        (
            {"video": embeds(2, 2, 2, timestamps_s=[1.0, 0.5])},
            r"video\.embeds\.timestamps_s\[1\] must not be below the one before, 1\.0, got 0\.5",
        ),
        (
            {"video": embeds(2, 2, 2, timestamps_s=[-0.5, 1.0])},
            r"video\.embeds\.timestamps_s\[0\] must be between 0 and 604800, got -0\.5",
        ),
        ({"video": embeds(1, 2, 2, timestamps_s=[math.nan])}, r"timestamps_s\[0\] must be .* got nan"),
        ({"video": embeds(1, 2, 2, timestamps_s=[math.inf])}, r"timestamps_s\[0\] must be .* got inf"),
        (
            {"video": embeds(2, 2, 2, digest=b"short", **TIMES["a step"])},
            r"video\.embeds\.digest must have 32 bytes, got 5",
        ),
        ({"video": with_frame_sampling()}, r"video\.frame_sampling must not be set beside embeds"),
        (
            {"image": embeds(1, 2, 2, bytes(16 * 2**20 + 1))},
            "hold 16777217 bytes of inline media, at most 16777216 are allowed",
        ),
        (
            {"video": embeds(MAX_EMBEDS_SLICES + 1, 1, 1, **TIMES["a step"])},
            "hold embeddings of 32769 temporal slices, at most 32768 are allowed",
        ),
    ],
)
def test_wrong_embeddings_are_refused_by_field(media: dict[str, prompt_pb2.Media], named: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^prompt\.messages.*{named}"):
        conversation_of(prompt(**media))


def test_embeddings_and_files_count_together_against_the_inline_limit() -> None:
    asked = prompt(image=embeds(1, 2, 2, bytes(9 * 2**20)))
    asked.messages[0].parts.append(prompt_pb2.Part(video=prompt_pb2.Media(data=bytes(8 * 2**20))))
    with pytest.raises(InvalidRequest, match="17825792 bytes of inline media, at most 16777216 are allowed"):
        conversation_of(asked)


def test_more_media_than_a_prompt_may_hold_are_refused() -> None:
    picture = prompt_pb2.Part(image=prompt_pb2.Media(path="picture.png"))
    many = prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=[picture] * 512)
    assert len(conversation_of(prompt_pb2.Prompt(messages=[many])).media) == 512
    many.parts.append(picture)
    with pytest.raises(InvalidRequest, match=r"^prompt\.messages hold 513 media, at most 512 are allowed"):
        conversation_of(prompt_pb2.Prompt(messages=[many]))
