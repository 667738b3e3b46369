"""Embeddings of a prompt are laid out by their grid and time base, which are checked."""

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
    """A planner for each family."""
    return Planner(Checkpoint(family_checkpoint), None)


def embeds(t: int, h: int, w: int, data: bytes = b"tower", **fields: Any) -> prompt_pb2.Media:
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, data=data)
    grid = prompt_pb2.Grid(t=t, h=h, w=w)
    return prompt_pb2.Media(embeds=prompt_pb2.MediaEmbeds(tensor=tensor, grid=grid, **fields))


def step(seconds: Fraction) -> prompt_pb2.Rational:
    return prompt_pb2.Rational(numerator=seconds.numerator, denominator=seconds.denominator)


def prompt(**media: prompt_pb2.Media) -> prompt_pb2.Prompt:
    """A user's message with one `image` or `video`, and a question."""
    parts = [prompt_pb2.Part(**media), prompt_pb2.Part(text="so?")]  # type: ignore[arg-type]
    return prompt_pb2.Prompt(messages=[prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=parts)])


def planned(planner: Planner, **media: prompt_pb2.Media) -> PromptPlan:
    return planner.plan(conversation_of(prompt(**media))).plan


def item_of(planner: Planner, **media: prompt_pb2.Media) -> MediaPlan:
    (item,) = planned(planner, **media).media
    return item


@pytest.mark.parametrize("base", TIMES)
def test_embeddings_have_a_plan_without_frames_on_the_wire(tiny: Planner, base: str) -> None:
    result = tiny.plan(conversation_of(prompt(video=embeds(3, 2, 4, **TIMES[base]))))
    (item,) = result.plan.media
    assert (item.modality, item.grid, item.brings_embeds) == (Modality.VIDEO, Grid(3, 2, 4), True)
    assert (item.frames, item.frame_height_px, item.frame_width_px, item.timestamps_s) == (0, 0, 0, ())
    assert [list(media.slices()) for media in result.media] == [[]]
    receiver = PlanReceiver()
    (received,) = filter(None, map(receiver.add, plan_messages(result.plan)))
    assert received.media == result.plan.media


def test_embeddings_of_an_image_have_no_time_base(tiny: Planner) -> None:
    item = item_of(tiny, image=embeds(1, 3, 5))
    assert (item.modality, item.grid, item.seconds_per_grid) == (Modality.IMAGE, Grid(1, 3, 5), None)
    assert len(item.runs) == 1


def test_embeddings_of_a_video_are_laid_out_like_the_video(tiny: Planner) -> None:
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
def test_a_step_alone_implies_evenly_spaced_frames(
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


def test_slices_of_their_own_show_the_given_timestamps(tmp_path: Path) -> None:
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
def test_timestamps_alone_give_the_exact_mean_step(tiny: Planner, times_s: list[float], seconds: Fraction) -> None:
    item = item_of(tiny, video=embeds(len(times_s), 1, 1, timestamps_s=times_s))
    assert item.seconds_per_grid == seconds


@given(times_s=st.lists(st.floats(0, WEEK), min_size=2, max_size=40, unique=True).map(sorted))
def test_any_increasing_timestamps_give_a_mean_step_that_fits_the_wire(times_s: list[float]) -> None:
    base = TimeBase.of_slices(times_s)
    mean = (Fraction(str(times_s[-1])) - Fraction(str(times_s[0]))) / (len(times_s) - 1)
    assert base.seconds_per_grid > 0
    assert max(base.seconds_per_grid.numerator, base.seconds_per_grid.denominator) < 2**63
    assert abs(base.seconds_per_grid - mean) <= Fraction(1, 10**12)
    assert base.slices_s == tuple(times_s)


def test_equal_timestamps_give_a_positive_step(tiny: Planner) -> None:
    """For example a screen recording in which nothing changes."""
    item = item_of(tiny, video=embeds(3, 1, 1, timestamps_s=[0.5, 0.5, 0.5]))
    assert item.seconds_per_grid is not None
    assert item.seconds_per_grid > 0


def test_negative_zero_is_shown_as_zero() -> None:
    assert [str(time) for time in TimeBase.of_slices([-0.0, 1.0]).slices_s] == ["0.0", "1.0"]


def test_positions_scale_with_the_mean_step(tiny_checkpoint: Path) -> None:
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


def test_a_digest_replaces_an_omitted_tensor(tiny: Planner) -> None:
    digest = hashlib.sha256(struct.pack("<i", tensor_pb2.DTYPE_FLOAT32) + b"tower").digest()
    whole, left_out = embeds(1, 2, 2), embeds(1, 2, 2, b"", digest=digest)
    assert item_of(tiny, image=whole).content_hash == item_of(tiny, image=left_out).content_hash
    other = embeds(1, 2, 2, b"", digest=bytes(32))
    halves = embeds(1, 2, 2)
    halves.embeds.tensor.dtype = tensor_pb2.DTYPE_BFLOAT16
    assert item_of(tiny, image=halves).content_hash != item_of(tiny, image=whole).content_hash
    assert item_of(tiny, image=other).content_hash != item_of(tiny, image=whole).content_hash


STEP, THREE_TIMES = TIMES["a step"], TIMES["times"]
NO_GRID = prompt_pb2.Media(embeds=prompt_pb2.MediaEmbeds(seconds_per_grid=step(Fraction(1))))
SAMPLED = embeds(2, 2, 2, **STEP)
SAMPLED.frame_sampling.CopyFrom(prompt_pb2.FrameSampling(max_pixels=4096))


def stepped(numerator: int, denominator: int) -> prompt_pb2.Media:
    return embeds(2, 2, 2, seconds_per_grid=prompt_pb2.Rational(numerator=numerator, denominator=denominator))


@pytest.mark.parametrize(
    ("kind", "media", "named"),
    [
        ("video", embeds(2, 2, 2), "seconds_per_grid or timestamps_s must be set: a video needs"),
        ("video", embeds(3, 2, 2, **STEP, **THREE_TIMES), "seconds_per_grid and timestamps_s are two time bases"),
        ("image", embeds(1, 2, 2, **STEP), "seconds_per_grid and timestamps_s are for videos"),
        ("image", embeds(1, 2, 2, timestamps_s=[0.0]), "seconds_per_grid and timestamps_s are for videos"),
        ("image", embeds(2, 2, 2), r"grid\.t of an image must be 1, got 2"),
        ("video", NO_GRID, "grid must be set"),
        ("video", embeds(2, 0, 2, **STEP), "grid is invalid: .* got 2×0×2"),
        ("video", embeds(2, 2**20, 2**20, **STEP), "grid is invalid: .* at most 4194304"),
        ("video", stepped(1, 0), r"seconds_per_grid\.denominator must be at least 1, got 0"),
        ("video", stepped(1, -2), r"seconds_per_grid\.denominator must be at least 1, got -2"),
        ("video", stepped(0, 1), "seconds_per_grid must be above 0, got 0"),
        ("video", stepped(-1, 2), "seconds_per_grid must be above 0, got -1/2"),
        ("video", stepped(WEEK, 1), "seconds_per_grid makes the video last 1209600 s, at most 604800"),
        ("video", embeds(2, 2, 2, **THREE_TIMES), "timestamps_s must hold one time for each of 2 slices, got 3"),
        ("video", embeds(2, 2, 2, timestamps_s=[1.0, 0.5]), r"timestamps_s\[1\] must not be below .* 1\.0, got 0\.5"),
        (
            "video",
            embeds(2, 2, 2, timestamps_s=[-0.5, 1.0]),
            r"timestamps_s\[0\] must be between 0 and 604800, got -0\.5",
        ),
        ("video", embeds(1, 2, 2, timestamps_s=[math.nan]), r"timestamps_s\[0\] must be .* got nan"),
        ("video", embeds(1, 2, 2, timestamps_s=[math.inf]), r"timestamps_s\[0\] must be .* got inf"),
        ("video", embeds(2, 2, 2, digest=b"short", **STEP), "digest must have 32 bytes, got 5"),
    ],
)
def test_wrong_embeddings_are_refused_with_their_field(kind: str, media: prompt_pb2.Media, named: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^prompt\.messages\[0\]\.parts\[0\]\.{kind}\.embeds\.{named}"):
        conversation_of(prompt(**{kind: media}))


@pytest.mark.parametrize(
    ("kind", "media", "named"),
    [
        ("video", SAMPLED, r"video\.frame_sampling must not be set beside embeds"),
        ("image", embeds(1, 2, 2, bytes(16 * 2**20 + 1)), "hold 16777217 bytes of inline media, at most 16777216"),
        (
            "video",
            embeds(MAX_EMBEDS_SLICES + 1, 1, 1, **STEP),
            "hold embeddings of 32769 temporal slices, at most 32768",
        ),
    ],
)
def test_embeddings_beyond_a_limit_are_refused(kind: str, media: prompt_pb2.Media, named: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^prompt\.messages.*{named}"):
        conversation_of(prompt(**{kind: media}))


def test_embeddings_and_files_count_together_against_the_inline_limit() -> None:
    asked = prompt(image=embeds(1, 2, 2, bytes(9 * 2**20)))
    asked.messages[0].parts.append(prompt_pb2.Part(video=prompt_pb2.Media(data=bytes(8 * 2**20))))
    with pytest.raises(InvalidRequest, match="17825792 bytes of inline media, at most 16777216 are allowed"):
        conversation_of(asked)
