"""The planner decodes nothing, hashes what tokens depend on, refuses bad media by name, and owns their files."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from PIL import Image

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract import plan
from gridsieve.common.contract.errors import InvalidRequest, MediaRejected, PromptTooLong
from gridsieve.common.contract.plan import Modality
from gridsieve.services.preprocessing import planner
from gridsieve.services.preprocessing.conversation import MediaRequest
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.video import decode
from tests.families import FAMILIES
from tests.media import picture
from tests.preprocessing.planning import image, planned, video
from tests.preprocessing.preprocessing_media import clip
from tests.preprocessing.worker_jobs import open_descriptors


@pytest.fixture(scope="module")
def tiny(family_checkpoint: Path) -> Planner:
    """A planner for each family."""
    return Planner(Checkpoint(family_checkpoint), None)


@pytest.fixture
def held(tiny_checkpoint: Path, tmp_path: Path) -> Planner:
    """A planner whose media root is tmp_path, with a good and a bad clip in it."""
    (tmp_path / "clip.mp4").write_bytes(clip(4))
    (tmp_path / "bad.mp4").write_bytes(b"bad")
    return Planner(Checkpoint(tiny_checkpoint), tmp_path)


QUICK = ("internvl", "llava", "llava_onevision", "minicpmv_2_6", "qwen2_5_vl", "qwen3_5", "qwen3_vl")


# Of MiniCPM-V an image without slices: fewer pixels make others fewer slices.
@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.deep) for each in sorted(FAMILIES)]
)
def test_a_plan_has_the_levels_of_the_tower_and_tokens_are_fixed_where_fewer_pixels_make_no_fewer(
    name: str, checkpoints: Callable[[str], Path]
) -> None:
    tiny, data = Planner(Checkpoint(checkpoints(name)), None), picture(50, 50)
    plan = planned(tiny, image(data)).plan
    assert plan.embed_levels == FAMILIES[name].levels
    (whole,) = plan.media
    try:
        half = planned(tiny, image(data, max_pixels=math.prod(whole.frames.size_px) // 2)).plan.media[0]
    except InvalidRequest:
        assert whole.fixed_tokens
    else:
        assert (whole.fixed_tokens, half.fixed_tokens) == (half.grid == whole.grid,) * 2


def test_planning_decodes_nothing(tiny: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    def decoded(*arguments: object) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(decode._Frames, "_decode", decoded)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decoded)
    planned(tiny, video(clip(30)), image(picture(90, 60)))


def test_content_hashes_differ_exactly_where_bytes_or_settings_differ(tiny: Planner) -> None:
    data, png = clip(60), picture(90, 60)
    looks = [
        video(data),
        video(clip(61)),
        video(data, fps=4.0),
        video(data, start_s=0.5),
        video(data, max_pixels=32 * 32),
        image(png),
        image(png, max_pixels=32 * 32),
        image(picture(90, 61)),
    ]
    hashes = [planned(tiny, look).plan.media[0].content_hash for look in looks]
    assert len(set(hashes)) == len(looks)
    again = planned(tiny, "x", image(png), replace(video(data), name="elsewhere")).plan
    assert [item.content_hash for item in again.media] == [hashes[5], hashes[0]]


def saved(kind: str, pictures: int = 1) -> bytes:
    """A file of pictures of different colours, by Pillow."""
    first, *others = (Image.new("RGB", (64, 48), (80 * number, 0, 0)) for number in range(pictures))
    file = io.BytesIO()
    first.save(file, kind, **({"save_all": True, "append_images": others} if others else {}))
    return file.getvalue()


MJPEG = b"".join(saved("JPEG") for _ in range(6))
BOTH, IMAGE, VIDEO = (Modality.IMAGE, Modality.VIDEO), (Modality.IMAGE,) * 2, (Modality.VIDEO,) * 2


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        *((saved(kind), IMAGE) for kind in ("AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")),
        *((saved(kind, pictures=3), BOTH) for kind in ("AVIF", "GIF", "PNG")),
        *((saved(kind, pictures=3), IMAGE) for kind in ("MPO", "TIFF")),
        (MJPEG, BOTH),
        *((clip(5, container=container), VIDEO) for container in ("mp4", "matroska", "mpegts", "flv", "avi", "3gp")),
    ],
)
def test_bytes_decide_what_media_are_and_the_request_what_animations_are(
    held: Planner, data: bytes, expected: tuple[Modality, Modality]
) -> None:
    looks = planned(held, "x", image(data), video(data), "?").plan.media
    assert tuple(item.modality for item in looks) == expected


def test_the_frames_of_an_animated_webp_are_refused_by_name(held: Planner) -> None:
    data = saved("WEBP", pictures=3)
    assert planned(held, image(data)).plan.media[0].modality is Modality.IMAGE
    with pytest.raises(MediaRejected, match=r"^video is animated WebP, which is not read"):
        planned(held, video(data))


@pytest.mark.parametrize("kind", ["ICO", "JPEG2000"])
def test_a_picture_that_pillow_is_not_asked_for_is_no_video(held: Planner, kind: str) -> None:
    for look in (image(saved(kind)), video(saved(kind))):
        with pytest.raises(MediaRejected, match=r"is a picture that is not read .*; convert it to JPEG"):
            planned(held, look)


def test_the_same_frames_at_other_times_have_another_hash(tiny: Planner) -> None:
    """Cutting the end changes the time between slices, but here no selected frame of Qwen2.5-VL."""
    data = clip(102, rate=10)
    shorter, longer = (planned(tiny, video(data, fps=0.1, end_s=end_s)).plan.media[0] for end_s in (10.0, 10.1))
    assert (shorter.seconds_per_grid, longer.seconds_per_grid) == (Fraction(5), Fraction(101, 20))
    assert shorter.content_hash != longer.content_hash


@pytest.mark.parametrize(
    ("look", "error", "named"),
    [
        (
            image(picture(170, 33_000), max_pixels=10**9),
            MediaRejected,
            "image has 170×33000 pixels.* at most 32768 .* side",
        ),
        (
            video(clip(4), max_pixels=783),
            InvalidRequest,
            r"video\.frame_sampling\.max_pixels must be at least 784, the pixels of one token, got",
        ),
        (video(clip(4), max_slices=1), InvalidRequest, r"video\.frame_sampling\.max_slices is not a setting of this"),
    ],
)
def test_bad_media_are_refused_by_name(held: Planner, look: MediaRequest, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=f"^{named}"):
        planned(held, look)


@pytest.mark.parametrize(
    ("where", "why"), [(planner, "^prompt has .* at most 10 are"), (plan, "^video is too large: .* at most 10 are")]
)
def test_a_prompt_or_video_of_too_many_tokens_is_refused(
    held: Planner, monkeypatch: pytest.MonkeyPatch, where: object, why: str
) -> None:
    monkeypatch.setattr(where, "MAX_PROMPT_TOKENS", 10)
    with pytest.raises(PromptTooLong, match=why):
        planned(held, video(clip(120)))


def test_files_are_closed_with_the_plan_or_if_planning_fails(held: Planner, tmp_path: Path) -> None:
    before = open_descriptors()
    with pytest.raises(MediaRejected):
        planned(held, video("clip.mp4"), video("bad.mp4"))
    assert open_descriptors() == before
    made = planned(held, video("clip.mp4"))
    assert open_descriptors() == before + 1
    made.files.close()
    assert open_descriptors() == before
