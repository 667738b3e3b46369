"""The planner computes grids, frames and hashes without decoding, refuses bad media by name, and owns their files."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from common.checkpoint import Checkpoint
from common.contract import plan
from common.contract.errors import InvalidRequest, MediaRejected, PromptTooLong
from common.contract.plan import Grid, Modality
from services.preprocessing import planner
from services.preprocessing.planner import Conversation, MediaRequest, PlannedPrompt, Planner
from services.preprocessing.prompt.tokens import Turn
from services.preprocessing.sources.source import path_source
from services.preprocessing.video import decode
from services.preprocessing.video.sampling import FrameSampling
from tests.families import FAMILIES
from tests.preprocessing.preprocessing_media import (
    HEIGHT_PX,
    WIDTH_PX,
    clip,
    number_of,
    transformers_indices,
    transformers_smart_resize,
    transformers_video_size,
)


def picture(height: int, width: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), "green").save(file, "PNG")
    return file.getvalue()


def video(data: bytes, **wish: Any) -> MediaRequest:
    return MediaRequest("video", Modality.VIDEO, data, FrameSampling(**wish))


def image(data: bytes, **wish: Any) -> MediaRequest:
    return MediaRequest("image", Modality.IMAGE, data, FrameSampling(**wish))


def planned(planner: Planner, *parts: str | MediaRequest) -> PlannedPrompt:
    media = tuple(part for part in parts if isinstance(part, MediaRequest))
    turn = Turn("user", tuple(part.modality if isinstance(part, MediaRequest) else part for part in parts))
    return planner.plan(Conversation((turn,), media))


@pytest.fixture(scope="module")
def tiny(family_checkpoint: Path) -> Planner:
    """A planner for each family."""
    return Planner(Checkpoint(family_checkpoint), None)


def edges(checkpoint: Path, file: str) -> tuple[int, int]:
    """The fewest and the most pixels that a processor's settings allow."""
    size = json.loads((checkpoint / file).read_text())["size"]
    return size["shortest_edge"], size["longest_edge"]


@pytest.mark.parametrize(
    ("frames", "rate"), [(1, 30), (5, 30), (77, Fraction(24000, 1001)), (200, Fraction(30000, 1001))]
)
def test_a_video_has_the_grid_frames_and_times_of_transformers(
    family: str, tiny: Planner, family_checkpoint: Path, frames: int, rate: Fraction
) -> None:
    (item,) = planned(tiny, video(clip(frames, rate=rate))).plan.media
    indices = transformers_indices(frames, float(rate), 2.0, 4, 768, family) if frames > 1 else [0]
    padded = [*indices, *indices[len(indices) - len(indices) % 2 :]]
    token_px = FAMILIES[family].token_px
    height, width = transformers_video_size(
        max(2, len(indices)),
        HEIGHT_PX,
        WIDTH_PX,
        token_px,
        *edges(family_checkpoint, "video_preprocessor_config.json"),
        cap=False,
        max_tokens=128000,
        family=family,
    )
    assert item.grid == Grid(len(padded) // 2, height // token_px, width // token_px)
    assert (item.frames, item.frame_height_px, item.frame_width_px) == (len(padded), height, width)
    assert item.seconds_per_grid == 2 * frames / (len(indices) * Fraction(rate))
    assert item.timestamps_s == tuple(index / float(rate) for index in padded)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (24, 40), (60, 90), (300, 20), (1000, 700)])
def test_an_image_has_the_grid_of_transformers(
    family: str, tiny: Planner, family_checkpoint: Path, height: int, width: int
) -> None:
    (item,) = planned(tiny, image(picture(height, width))).plan.media
    token_px = FAMILIES[family].token_px
    expected = transformers_smart_resize(height, width, token_px, *edges(family_checkpoint, "preprocessor_config.json"))
    assert (item.frame_height_px, item.frame_width_px) == expected
    assert item.grid == Grid(1, expected[0] // token_px, expected[1] // token_px)
    assert (item.frames, item.seconds_per_grid, item.timestamps_s) == (1, None, ())


@pytest.mark.parametrize("look", [image(picture(50, 51)), image(picture(10, 400)), video(clip(5)), video(clip(1))])
def test_no_frame_has_more_than_max_pixels(family: str, tiny: Planner, look: MediaRequest) -> None:
    token_px = FAMILIES[family].token_px
    for max_pixels in (32 * 32, 3000, 56 * 56, 10_000, 20_000):
        (item,) = planned(tiny, replace(look, sampling=FrameSampling(max_pixels=max_pixels))).plan.media
        assert item.frame_height_px * item.frame_width_px <= max_pixels
        assert (item.frame_height_px % token_px, item.frame_width_px % token_px) == (0, 0)


def test_the_sent_frames_are_the_planned_ones(family: str, tiny: Planner) -> None:
    result = planned(tiny, video(clip(110, rate=30), max_pixels=64 * 64))
    expected = transformers_indices(110, 30.0, 2.0, 4, 768, family)
    expected += expected[-1:] * (len(expected) % 2)
    slices = list(result.media[0].slices())
    assert [each.first_frame for each in slices] == list(range(0, len(expected), 2))
    pixels = np.concatenate([each.pixels for each in slices])
    (item,) = result.plan.media
    assert pixels.shape == (item.frames, item.frame_height_px, item.frame_width_px, 3)
    enlarged = [np.asarray(Image.fromarray(frame).resize((WIDTH_PX, HEIGHT_PX))) for frame in pixels]
    assert [number_of(frame) for frame in enlarged] == expected


def test_planning_decodes_nothing(tiny: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(*arguments: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(decode._Frames, "_decode", decoded)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded)
    planned(tiny, video(clip(30)), image(picture(60, 90)))


def test_content_hashes_differ_exactly_where_bytes_or_settings_differ(tiny: Planner) -> None:
    data, other = clip(60), clip(61)
    png = picture(60, 90)
    looks = [
        video(data),
        video(other),
        video(data, fps=4.0),
        video(data, start_s=0.5),
        video(data, max_pixels=32 * 32),
        image(png),
        image(png, max_pixels=32 * 32),
        image(picture(61, 90)),
        video(png),
    ]
    hashes = [planned(tiny, look).plan.media[0].content_hash for look in looks]
    assert len(set(hashes)) == len(looks)
    again = planned(tiny, "x", image(png), replace(video(data), name="elsewhere")).plan
    assert [item.content_hash for item in again.media] == [hashes[5], hashes[0]]


def test_the_same_frames_at_other_times_have_another_hash(tiny: Planner) -> None:
    """Cutting the end changes the time between slices, but here no selected frame of Qwen2.5-VL."""
    data = clip(102, rate=10)
    shorter, longer = (planned(tiny, video(data, fps=0.1, end_s=end_s)).plan.media[0] for end_s in (10.0, 10.1))
    assert (shorter.seconds_per_grid, longer.seconds_per_grid) == (Fraction(5), Fraction(101, 20))
    assert shorter.content_hash != longer.content_hash


@pytest.mark.parametrize(
    ("look", "error", "named"),
    [
        (video(b"garbage"), MediaRejected, "video is not a readable video"),
        (image(b"garbage"), MediaRejected, "image is not a readable image"),
        (
            image(picture(1, 201)),
            MediaRejected,
            "^image has frames of 201×1 pixels, an aspect ratio of 201, at most 200",
        ),
        (
            image(picture(170, 33_000), max_pixels=10**9),
            MediaRejected,
            "^image would be sent as frames of .* at most 32768 are allowed on a side",
        ),
        (video(clip(4), start_s=9.0), InvalidRequest, r"^video\.frame_sampling\.start_s"),
    ],
)
def test_bad_media_are_refused_by_name(tiny: Planner, look: MediaRequest, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        planned(tiny, look)


def test_max_pixels_below_one_token_are_refused(family: str, tiny: Planner) -> None:
    least = FAMILIES[family].token_px ** 2
    named = rf"video\.frame_sampling\.max_pixels must be at least one token's {least}, got {least - 1}"
    with pytest.raises(InvalidRequest, match=named):
        planned(tiny, video(clip(4), max_pixels=least - 1))


def test_a_prompt_of_too_many_tokens_is_refused(tiny: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_PROMPT_TOKENS", 10)
    with pytest.raises(PromptTooLong, match="at most 10 are allowed"):
        planned(tiny, video(clip(60)))


def test_a_video_of_too_many_tokens_is_refused_by_name(tiny: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MAX_PROMPT_TOKENS", 7)
    with pytest.raises(PromptTooLong, match=r"^video is too large: .* at most 7 are allowed$"):
        planned(tiny, video(clip(60)))


def test_files_are_closed_if_planning_fails(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip(4))
    (tmp_path / "bad.mp4").write_bytes(b"bad")
    held = Planner(Checkpoint(tiny_checkpoint), tmp_path)
    before = len(list(Path("/proc/self/fd").iterdir()))
    good = MediaRequest("video", Modality.VIDEO, "clip.mp4", FrameSampling())
    with pytest.raises(MediaRejected):
        planned(held, good, replace(good, location="bad.mp4"))
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    planned(held, good).files.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_the_planner_closes_fetched_sources(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(clip(4))
    held = Planner(Checkpoint(tiny_checkpoint), None)
    closed: list[str] = []

    def fetched(name: str) -> MediaRequest:
        source = path_source(name, "clip.mp4", tmp_path)

        def close() -> None:
            source.close()
            closed.append(name)

        return MediaRequest(name, Modality.VIDEO, replace(source, on_close=close), FrameSampling())

    made = planned(held, fetched("first"), fetched("second"))
    assert closed == []
    assert made.plan.media == planned(held, video(clip(4)), video(clip(4))).plan.media
    made.files.close()
    assert sorted(closed) == ["first", "second"]
    with pytest.raises(MediaRejected):
        planned(held, video(b"bad"), fetched("behind one that is bad"))
    assert closed[2:] == ["behind one that is bad"]
