"""A plan is what transformers' processor would make of the same media, and nothing is decoded for it."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

from common.checkpoint import Checkpoint
from common.errors import InvalidRequest, MediaRejected, PromptTooLong, StartupError
from common.plan import Grid, Modality
from services.preprocessing import decode, planner
from services.preprocessing.families import load_family
from services.preprocessing.families.qwen2_5_vl import Qwen25VL
from services.preprocessing.planner import Conversation, MediaRequest, PlannedPrompt, Planner
from services.preprocessing.sampling import FrameSampling
from services.preprocessing.tokens import Turn
from tests.unit.preprocessing_media import (
    HEIGHT_PX,
    WIDTH_PX,
    clip,
    number_of,
    transformers_indices,
    transformers_smart_resize,
    transformers_video_size,
)

TINY_MIN, TINY_MAX, FACTOR = 56 * 56, 168 * 168, 28


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
def tiny(tiny_checkpoint: Path) -> Planner:
    return Planner(Checkpoint(tiny_checkpoint), None)


def test_placeholders_expand_as_transformers_processor_expands_them(tiny: Planner, tiny_checkpoint: Path) -> None:
    plan = planned(tiny, image(picture(60, 90)), "and", video(clip(60)), "what?").plan
    sizes = [(item.frame_height_px // 14, item.frame_width_px // 14) for item in plan.media]
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(merge_size=2),
        video_processor=SimpleNamespace(merge_size=2),
        image_token="<|image_pad|>",
        video_token="<|video_pad|>",
    )
    pads = [
        Qwen2_5_VLProcessor.replace_image_token(processor, {"image_grid_thw": torch.tensor([[1, *sizes[0]]])}, 0),
        Qwen2_5_VLProcessor.replace_video_token(
            processor, {"video_grid_thw": torch.tensor([[plan.media[1].frames // 2, *sizes[1]]])}, 0
        ),
    ]
    text = (
        f"<|im_start|>user\n<|vision_start|>{pads[0]}<|vision_end|>and<|vision_start|>{pads[1]}<|vision_end|>what?"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
    assert plan.input_ids.tolist() == AutoTokenizer.from_pretrained(tiny_checkpoint)(text)["input_ids"]


@pytest.mark.parametrize(
    ("frames", "rate"), [(1, 30), (5, 30), (60, 30), (77, Fraction(24000, 1001)), (200, Fraction(30000, 1001))]
)
def test_a_videos_grid_frames_and_time_base_are_those_of_transformers(
    tiny: Planner, frames: int, rate: Fraction
) -> None:
    (item,) = planned(tiny, video(clip(frames, rate=rate))).plan.media
    indices = transformers_indices(frames, float(rate), 2.0, 4, 768) if frames > 1 else [0]
    height, width = transformers_video_size(
        len(indices), HEIGHT_PX, WIDTH_PX, FACTOR, TINY_MIN, TINY_MAX, cap=False, max_tokens=128000
    )
    slices = (len(indices) + 1) // 2
    assert item.grid == Grid(slices, height // FACTOR, width // FACTOR)
    assert (item.frames, item.frame_height_px, item.frame_width_px) == (2 * slices, height, width)
    assert item.seconds_per_grid == 2 * frames / (len(indices) * Fraction(rate))
    expected = [index / float(rate) for index in [*indices, *indices[len(indices) - len(indices) % 2 :]]]
    assert item.timestamps_s == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (24, 40), (60, 90), (300, 20), (1000, 700)])
def test_an_images_grid_is_that_of_transformers(tiny: Planner, height: int, width: int) -> None:
    (item,) = planned(tiny, image(picture(height, width))).plan.media
    expected = transformers_smart_resize(height, width, FACTOR, TINY_MIN, TINY_MAX)
    assert (item.frame_height_px, item.frame_width_px) == expected
    assert item.grid == Grid(1, expected[0] // FACTOR, expected[1] // FACTOR)
    assert (item.frames, item.seconds_per_grid, item.timestamps_s) == (1, None, ())


def test_positions_follow_the_formula_from_the_time_base_on(tiny: Planner) -> None:
    result = planned(tiny, "look", video(clip(120, rate=24)), "so?")
    plan = result.plan
    (item,) = plan.media
    (run,) = item.runs
    # 120 frames at 24 a second are 5 s: 10 frames sampled, 5 slices, 1 s each, 2 tokens a second.
    assert (item.seconds_per_grid, item.grid.t) == (Fraction(1), 5)
    start = run.offset
    expected = [
        (start + 2 * i, start + j, start + k) for i in range(5) for j in range(item.grid.h) for k in range(item.grid.w)
    ]
    assert plan.positions[:, run.offset : run.end].T.tolist() == [list(each) for each in expected]
    after = max(map(max, expected)) + 1
    text = plan.tokens - run.end
    assert plan.positions[:, run.end :].tolist() == [list(range(after, after + text))] * 3
    assert plan.positions[:, : run.offset].tolist() == [list(range(run.offset))] * 3


def test_the_frames_that_are_sent_are_those_that_were_planned(tiny: Planner) -> None:
    result = planned(tiny, video(clip(90, rate=30), max_pixels=56 * 56))
    expected = transformers_indices(90, 30.0, 2.0, 4, 768)
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


def test_text_alone_has_a_plan(tiny: Planner) -> None:
    plan = planned(tiny, "hello").plan
    assert plan.media == ()
    assert plan.positions.tolist() == [list(range(plan.tokens))] * 3


def test_the_same_look_at_the_same_bytes_has_the_same_hash_and_any_other_another(tiny: Planner) -> None:
    data, other = clip(60), clip(61)
    png = picture(60, 90)
    looks = [
        video(data),
        video(other),
        video(data, fps=4.0),
        video(data, start_s=0.5),
        video(data, max_pixels=28 * 28),
        image(png),
        image(png, max_pixels=28 * 28),
        image(picture(61, 90)),
    ]
    hashes = [planned(tiny, look).plan.media[0].content_hash for look in looks]
    assert len(set(hashes)) == len(looks)
    again = planned(tiny, "x", image(png), replace(video(data), name="elsewhere")).plan
    assert [item.content_hash for item in again.media] == [hashes[5], hashes[0]]


def test_a_picture_read_as_a_video_has_another_hash_than_as_an_image(tiny: Planner) -> None:
    png = picture(60, 90)
    as_image, as_video = (planned(tiny, look).plan.media[0] for look in (image(png), video(png)))
    assert as_video.frames == 2
    assert as_image.content_hash != as_video.content_hash


@pytest.mark.parametrize(
    ("look", "error", "named"),
    [
        (video(b"garbage"), MediaRejected, "video is no video that can be read"),
        (image(b"garbage"), MediaRejected, "image is no image that can be read"),
        (image(picture(1, 201)), MediaRejected, "aspect ratio of 201, at most 200"),
        (image(picture(170, 33_000), max_pixels=10**9), MediaRejected, "at most 32768 are allowed on a side"),
        (video(clip(4), max_pixels=783), InvalidRequest, r"video\.frame_sampling\.max_pixels .* 784, got 783"),
        (video(clip(4), start_s=9.0), InvalidRequest, r"video\.frame_sampling\.start_s"),
    ],
)
def test_bad_media_are_refused_by_name(tiny: Planner, look: MediaRequest, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        planned(tiny, look)


def test_a_prompt_beyond_any_limit_is_refused_before_it_is_laid_out(
    tiny: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "MAX_PROMPT_TOKENS", 10)
    with pytest.raises(PromptTooLong, match="at most 10 are allowed"):
        planned(tiny, video(clip(60)))


def test_files_are_closed_where_planning_fails(tiny_checkpoint: Path, tmp_path: Path) -> None:
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


def checkpoint_with(folder: Path, original: Path, **files: dict[str, Any] | None) -> Checkpoint:
    """The tiny checkpoint with some of its JSON files changed; None leaves one out."""
    for file in original.iterdir():
        changes = files.get(file.stem, {})
        if changes is None:
            continue
        if changes:
            (folder / file.name).write_text(json.dumps(json.loads(file.read_text()) | changes))
        else:
            (folder / file.name).symlink_to(file)
    return Checkpoint(folder)


@pytest.mark.parametrize(
    ("frames", "height", "width"), [(4, 720, 1280), (200, 720, 1280), (768, 720, 1280), (8, 60, 90)]
)
def test_capped_checkpoints_share_their_pixels_among_frames_as_transformers_does(
    tmp_path: Path, tiny_checkpoint: Path, frames: int, height: int, width: int
) -> None:
    settings = {
        "cap_pixels_per_frame": True,
        "max_video_tokens": 4000,
        "size": {"shortest_edge": 3136, "longest_edge": 602112},
    }
    family = load_family(checkpoint_with(tmp_path, tiny_checkpoint, video_preprocessor_config=settings))
    expected = transformers_video_size(frames, height, width, FACTOR, 3136, 602112, cap=True, max_tokens=4000)
    assert family.video_size(height, width, frames, FrameSampling()) == expected


def test_budgets_named_the_old_way_are_read_and_videos_fall_back_to_the_images(
    tmp_path: Path, tiny_checkpoint: Path
) -> None:
    old = {"min_pixels": 3136, "max_pixels": 12845056}
    checkpoint = checkpoint_with(tmp_path, tiny_checkpoint, preprocessor_config=old, video_preprocessor_config=None)
    family = Qwen25VL.from_checkpoint(checkpoint)
    for budget in (family.image_budget, family.video_budget):
        assert (budget.min_px, budget.max_px) == (3136, 12845056)
    assert (family.frame_bounds.fps, family.frame_bounds.min_frames, family.frame_bounds.max_frames) == (2, 4, 768)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"patch_size": 16}, "video processor's patch_size is 16, the model's is 14"),
        ({"resample": 2}, "video processor's resample is 2, only 3 is supported"),
        ({"do_resize": False}, "video processor's do_resize is False, only True is supported"),
        ({"num_frames": 8}, "video processor's num_frames is 8, only None is supported"),
    ],
)
def test_settings_that_are_not_supported_refuse_to_start(
    tmp_path: Path, tiny_checkpoint: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(StartupError, match=named):
        load_family(checkpoint_with(tmp_path, tiny_checkpoint, video_preprocessor_config=changes))
