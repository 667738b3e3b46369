"""Embeddings of a prompt are laid out by their grid and time base, which are checked."""

from __future__ import annotations

import hashlib
import math
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import MediaPlan, PromptPlan
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.rpc.messages import MAX_EMBEDS_SLICES, conversation_of
from gridsieve.services.preprocessing.video.timing import MAX_LENGTH_S, TimeBase
from gridsieve.v1 import prompt_pb2, tensor_pb2
from tests.preprocessing.preprocessing_media import clip

WEEK = MAX_LENGTH_S


@pytest.fixture(scope="module")
def tiny(family_checkpoint: Path) -> Planner:
    """A planner for each family."""
    return Planner(Checkpoint(family_checkpoint), None)


def embeds(t: int, h: int, w: int, data: bytes = b"tower", **fields: Any) -> prompt_pb2.Media:
    tensor = tensor_pb2.Tensor(dtype=tensor_pb2.DTYPE_FLOAT32, data=data)
    grid = prompt_pb2.Grid(t=t, h=h, w=w)
    return prompt_pb2.Media(embeds=prompt_pb2.MediaEmbeds(tensor=tensor, grid=grid, **fields))


def step(seconds: Fraction | int) -> dict[str, Any]:
    return {"seconds_per_grid": prompt_pb2.Rational(numerator=seconds.numerator, denominator=seconds.denominator)}


def prompt(**media: prompt_pb2.Media) -> prompt_pb2.Prompt:
    """A user's message with an `image`, a `video` or both, and a question."""
    parts = [prompt_pb2.Part(**{kind: each}) for kind, each in media.items()]  # type: ignore[arg-type]
    parts.append(prompt_pb2.Part(text="so?"))
    return prompt_pb2.Prompt(messages=[prompt_pb2.Message(role=prompt_pb2.ROLE_USER, parts=parts)])


def planned(planner: Planner, **media: prompt_pb2.Media) -> PromptPlan:
    return planner.plan(conversation_of(prompt(**media))).plan


def item_of(planner: Planner, **media: prompt_pb2.Media) -> MediaPlan:
    (item,) = planned(planner, **media).media
    return item


def test_embeddings_of_a_video_are_laid_out_like_the_video(tiny: Planner) -> None:
    sampling = prompt_pb2.FrameSampling(fps=24000 / 1001)  # all of its frames, which are evenly spaced
    video = prompt_pb2.Media(data=clip(20, rate=Fraction(24000, 1001)), frame_sampling=sampling)
    by_pixels = planned(tiny, video=video)
    (item,) = by_pixels.media
    assert item.seconds_per_grid
    slices_s = [(a + b) / 2 for a, b in zip(item.timestamps_s[::2], item.timestamps_s[1::2], strict=True)]
    for base in ({"timestamps_s": slices_s}, step(item.seconds_per_grid)):
        given = planned(tiny, video=embeds(item.grid.t, item.grid.h, item.grid.w, **base))
        assert given.input_ids.tolist() == by_pixels.input_ids.tolist()
        assert given.positions.tolist() == by_pixels.positions.tolist()
        assert given.media[0].runs == item.runs
        assert given.media[0].seconds_per_grid == pytest.approx(item.seconds_per_grid)


@given(times_s=st.lists(st.floats(0, WEEK), min_size=2, max_size=40).map(sorted))
@example(times_s=[0.5, 0.5, 0.5])  # a screen recording in which nothing changes
@example(times_s=[0.1, 0.4, 1.3])  # 0.6 s apart, which floats are not
def test_timestamps_give_their_mean_step_as_exactly_as_the_wire_allows(times_s: list[float]) -> None:
    base = TimeBase.of_slices(times_s)
    mean = (Fraction(str(times_s[-1])) - Fraction(str(times_s[0]))) / (len(times_s) - 1)
    assert base.seconds_per_grid > 0
    assert max(base.seconds_per_grid.numerator, base.seconds_per_grid.denominator) < 2**63
    assert abs(base.seconds_per_grid - mean) <= (Fraction(1, 10**12) if mean.denominator > 2**30 or not mean else 0)
    assert base.slices_s == tuple(times_s)


def test_a_single_slice_takes_a_second_and_negative_zero_is_shown_as_zero() -> None:
    base = TimeBase.of_slices([-0.0])
    assert (base.seconds_per_grid, str(base.slices_s)) == (Fraction(1), "(0.0,)")


def test_different_embeddings_grids_and_time_bases_have_different_hashes(tiny: Planner) -> None:
    second = step(1)
    looks = [
        embeds(4, 2, 3, **second),
        embeds(4, 2, 3, b"other", **second),
        embeds(4, 3, 2, **second),
        embeds(2, 4, 3, **second),
        embeds(4, 2, 3, **step(Fraction(1, 2))),
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


SECOND = step(1)
NO_GRID = prompt_pb2.Media(embeds=prompt_pb2.MediaEmbeds(**SECOND))
SAMPLED = embeds(2, 2, 2, **SECOND)
SAMPLED.frame_sampling.max_pixels = 4096


def stepped(numerator: int, denominator: int) -> prompt_pb2.Media:
    return embeds(2, 2, 2, seconds_per_grid=prompt_pb2.Rational(numerator=numerator, denominator=denominator))


def timed(*times_s: float) -> prompt_pb2.Media:
    return embeds(2, 2, 2, timestamps_s=times_s)


@pytest.mark.parametrize(
    ("kind", "media", "named"),
    [
        ("video", SAMPLED, r"frame_sampling must not be set with embeds"),
        ("video", embeds(2, 2, 2), r"embeds\.seconds_per_grid or timestamps_s must be set: a video needs"),
        ("video", embeds(2, 2, 2, **SECOND, timestamps_s=[0, 1]), r"embeds\.seconds_per_grid and .* two time bases"),
        ("image", embeds(1, 2, 2, timestamps_s=[0.0]), r"embeds\.seconds_per_grid and timestamps_s are for videos"),
        ("video", NO_GRID, r"embeds\.grid must be set"),
        ("video", embeds(2, 0, 2, **SECOND), r"embeds\.grid is invalid: .* got 2×0×2"),
        ("video", embeds(2, 2**20, 2**20, **SECOND), r"embeds\.grid is invalid: .* at most 4194304"),
        ("video", stepped(1, 0), r"embeds\.seconds_per_grid\.denominator must be at least 1, got 0"),
        ("video", stepped(0, 1), r"embeds\.seconds_per_grid must be above 0, got 0"),
        ("video", stepped(WEEK, 1), r"embeds\.seconds_per_grid makes the video last 1209600 s, at most 604800"),
        ("video", timed(0.0, 1.0, 2.0), r"embeds\.timestamps_s must hold one time for each of 2 slices, got 3"),
        ("video", timed(1.0, 0.5), r"embeds\.timestamps_s\[1\] must not be below .* 1\.0, got 0\.5"),
        ("video", timed(-0.5, 1.0), r"embeds\.timestamps_s\[0\] must be between 0 and 604800, got -0\.5"),
        ("video", timed(math.nan, 1.0), r"embeds\.timestamps_s\[0\] must be .* got nan"),
        ("video", embeds(2, 2, 2, digest=b"short", **SECOND), r"embeds\.digest must have 32 bytes, got 5"),
    ],
)
def test_wrong_embeddings_are_refused_with_their_field(kind: str, media: prompt_pb2.Media, named: str) -> None:
    with pytest.raises(InvalidRequest, match=rf"^prompt\.messages\[0\]\.parts\[0\]\.{kind}\.{named}"):
        conversation_of(prompt(**{kind: media}))


def test_slices_are_limited_and_embeddings_count_with_files_against_the_inline_limit() -> None:
    with pytest.raises(InvalidRequest, match=r"^prompt\.messages hold embeddings of 32769 temporal slices, at most"):
        conversation_of(prompt(video=embeds(MAX_EMBEDS_SLICES + 1, 1, 1, **SECOND)))
    both = prompt(image=embeds(1, 2, 2, bytes(9 * 2**20)), video=prompt_pb2.Media(data=bytes(8 * 2**20)))
    with pytest.raises(InvalidRequest, match=r"^prompt\.messages hold 17825792 bytes of inline media, --max"):
        conversation_of(both, 16 * 2**20)
