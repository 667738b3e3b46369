"""Each family samples and sizes frames like its processors in transformers, with the checkpoint's settings."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor
from transformers.models.cosmos3_edge.image_processing_pil_cosmos3_edge import Cosmos3EdgeImageProcessorPil
from transformers.video_utils import VideoMetadata

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import MediaRejected, StartupError
from gridsieve.families.glm.prompt import Glm46V
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.video.resize import PixelBudget
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from tests.families import FAMILIES
from tests.media import picture
from tests.preprocessing.planning import ids_of, image, plan_of, video, with_settings
from tests.preprocessing.preprocessing_media import (
    clip,
    transformers_image_size,
    transformers_indices,
    transformers_processor,
    transformers_video_processor,
    transformers_video_size,
)

RATES = [Fraction(1), Fraction(10), Fraction(24000, 1001), Fraction(25), Fraction(30), Fraction(30000, 1001)]
QWEN = ("qwen2_5_vl", "qwen3_vl")
of_qwen = pytest.mark.parametrize("family", QWEN, indirect=True)


@pytest.fixture(scope="module", params=[*QWEN, "cosmos3_edge", "glm4v", "glm46v", "video_llama_3"])
def family(request: pytest.FixtureRequest) -> str:
    """Qwen2-VL and Qwen3.5 sample and size as Qwen2.5-VL and Qwen3-VL do."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def loaded(family_checkpoint: Path) -> Any:
    return load_family(Checkpoint(family_checkpoint))


@given(
    frames=st.integers(2, 4000) | st.integers(2, 3_000_000),
    rate=st.sampled_from(RATES) | st.fractions(Fraction(1, 2), 240, max_denominator=1001),
    fps=st.sampled_from([1.0, 2.0, 4.0, 23.976]) | st.floats(0.1, 120),
    low=st.integers(2, 64),
    high=st.integers(2, 768),
)
@example(frames=1195207, rate=Fraction(24000, 1001), fps=2.0, low=4, high=768)  # rounds by lanes of 8
@example(frames=1289433, rate=Fraction(1), fps=1.0, low=2, high=360)  # ends with half a pair of lanes
@example(frames=68, rate=Fraction(24000, 1001), fps=5.622115197626865, low=4, high=768)  # ends after the last frame
@example(frames=4, rate=Fraction(30), fps=2.0, low=4, high=768)  # of which GLM-4.6V's processor takes none
@example(frames=9001, rate=Fraction(30), fps=2.0, low=4, high=768)  # longer than GLM samples at this rate
@example(frames=100, rate=Fraction(1, 20), fps=2.0, low=4, high=768)  # longer, and fewer frames than are asked for
def test_indices_equal_those_of_transformers(
    family: str, loaded: Any, frames: int, rate: Fraction, fps: float, low: int, high: int
) -> None:
    bounds: FrameBounds = loaded.frame_bounds
    if family.startswith("glm"):
        bounds, frames = replace(bounds, max_frames=10**6), min(frames, 100_000)  # which transformers walks one by one
    elif family != "cosmos3_edge":
        bounds = replace(bounds, min_frames=low, max_frames=high)
    if family != "glm46v":  # whose frames depend on the video's length alone
        bounds = replace(bounds, fps=fps)
    expected = transformers_indices(frames, float(rate), fps, bounds.min_frames, bounds.max_frames, family)
    # Rounding sometimes puts Qwen2-VL's last index after the last frame: transformers fails, and it is dropped here.
    expected = [index for index in expected if index < frames] or [0]
    assert list(loaded.sample_indices(frames, rate, bounds)) == expected


def test_a_video_of_one_frame_yields_that_frame(loaded: Any) -> None:
    assert list(loaded.sample_indices(1, Fraction(30), loaded.frame_bounds)) == [0]


LOW = st.sampled_from([28 * 28, 56 * 56, 4096, 128 * 32 * 32, 10**6])
HIGH = st.sampled_from([112 * 112, 32 * 32 * 768, 12845056, 25165824, 47040000])
SIDES = st.integers(1, 5000)


@given(
    frames=st.integers(1, 768),
    height=SIDES,
    width=SIDES,
    low=LOW,
    high=HIGH,
    max_tokens=st.none() | st.sampled_from([16, 768, 4000, 128_000]),
)
@example(frames=5, height=720, width=1280, low=4096, high=4_000_000, max_tokens=None)  # 5 frames count as 4
@example(frames=1, height=720, width=1280, low=4096, high=25165824, max_tokens=768)
@example(frames=9, height=5, width=900, low=4096, high=25165824, max_tokens=None)  # thinner than a token
def test_video_sizes_equal_those_of_transformers(
    family: str, loaded: Any, frames: int, height: int, width: int, low: int, high: int, max_tokens: int | None
) -> None:
    low, token_px = min(low, high), FAMILIES[family].token_px
    max_tokens = max_tokens if family in QWEN else None
    sized = replace(loaded, video_budget=PixelBudget(token_px, low, high), max_video_tokens=max_tokens)
    # A single frame is sent as two, because transformers fails for one frame of Qwen3-VL.
    counted = max(frames, 2) if family == "qwen3_vl" else frames
    try:
        expected = transformers_video_size(counted, height, width, token_px, low, high, max_tokens, family)
    except ValueError:
        with pytest.raises(MediaRejected, match="at most 200"):
            sized.video_size(height, width, frames, FrameSampling())
    else:
        assert sized.video_size(height, width, frames, FrameSampling()) == expected


@given(height=SIDES, width=SIDES, low=LOW, high=HIGH)
@example(height=5, width=900, low=12544, high=47040000)  # thinner than a token
def test_image_sizes_equal_those_of_transformers(
    family: str, loaded: Any, height: int, width: int, low: int, high: int
) -> None:
    low, side = min(low, high), loaded.image_budget.factor_px
    sized = replace(loaded, image_budget=PixelBudget(side, low, high))
    try:
        expected = transformers_image_size(height, width, side, low, high, family)
    except ValueError:
        with pytest.raises(MediaRejected, match="at most 200"):
            sized.image_size(height, width, FrameSampling())
        return
    assert sized.image_size(height, width, FrameSampling()) == expected
    if family in QWEN:
        roomy = replace(loaded, image_budget=PixelBudget(side, low, 10**8))
        assert roomy.image_size(height, width, FrameSampling(max_pixels=high)) == expected


@of_qwen
@given(slices=st.integers(1, 384), max_pixels=st.integers(64 * 64, 10**6))
def test_max_pixels_bounds_each_frame_and_is_used_fully(family: str, loaded: Any, slices: int, max_pixels: int) -> None:
    token_px = FAMILIES[family].token_px
    roomy = replace(loaded, video_budget=PixelBudget(token_px, 4096, 10**9), max_video_tokens=None)
    sides = roomy.video_size(1080, 1920, 2 * slices, FrameSampling(max_pixels=max_pixels))
    exact = [side * math.sqrt(max_pixels / (1080 * 1920)) for side in (1080, 1920)]
    assert sides == tuple(math.floor(side / token_px) * token_px for side in exact)


def loaded_with(folder: Path, original: Path, **files: dict[str, Any] | None) -> Any:
    return load_family(Checkpoint(with_settings(original, folder, **files)))


@of_qwen
def test_missing_settings_take_the_defaults_of_transformers(
    family: str, loaded: Any, tmp_path: Path, family_checkpoint: Path
) -> None:
    changed = {"size": None, "cap_pixels_per_frame": True}
    found = loaded_with(tmp_path, family_checkpoint, preprocessor_config=None, video_preprocessor_config=changed)
    theirs = transformers_video_processor(family)
    assert (found.video_budget.min_px, found.video_budget.max_px) == tuple(theirs.size.values())
    bounds = found.frame_bounds
    assert (bounds.fps, bounds.min_frames, bounds.max_frames) == (2, theirs.min_frames, theirs.max_frames)
    assert found.max_video_tokens == theirs.max_video_tokens
    assert loaded.max_video_tokens is None
    assert not theirs.cap_pixels_per_frame
    # The defaults of Qwen2VLImageProcessor, which all families use.
    assert (found.image_budget.min_px, found.image_budget.max_px) == (56 * 56, 28 * 28 * 1280)


@of_qwen
def test_old_names_of_budgets_are_read_where_transformers_reads_them(
    family: str, tmp_path: Path, family_checkpoint: Path
) -> None:
    """Of video processors only Qwen2-VL's reads them. Videos without settings of their own take those of images."""
    old = {"min_pixels": 3136, "max_pixels": 12845056}
    found = loaded_with(tmp_path, family_checkpoint, preprocessor_config=old, video_preprocessor_config=None)
    assert (found.image_budget.min_px, found.image_budget.max_px) == (3136, 12845056)
    size = json.loads((family_checkpoint / "preprocessor_config.json").read_text())["size"]
    expected = (3136, 12845056) if family.startswith("qwen2") else (size["shortest_edge"], size["longest_edge"])
    assert (found.video_budget.min_px, found.video_budget.max_px) == expected


@pytest.mark.parametrize("name", ["cosmos3_edge", "glm4v", "glm46v", "qwen2_vl", "qwen3_vl", "video_llama_3"])
@pytest.mark.parametrize("with_size", [True, False], ids=["beside a size", "alone"])
def test_pixel_bounds_of_images_are_those_that_the_familys_own_processor_reads(
    checkpoints: Callable[[str], Path], tmp_path: Path, name: str, with_size: bool
) -> None:
    file = with_settings(checkpoints(name), tmp_path, preprocessor_config={}) / "preprocessor_config.json"
    held = json.loads(file.read_text())
    if not with_size:
        del held["size"]
    for old in ({}, {"max_pixels": 200704}, {"min_pixels": 200704, "max_pixels": 401408}):
        file.write_text(json.dumps(held | old))
        theirs = AutoImageProcessor.from_pretrained(tmp_path)
        rows, columns = theirs(images=[Image.new("RGB", (287, 233))])["image_grid_thw"][0][1:]
        layout = load_family(Checkpoint(tmp_path)).image(233, 287, FrameSampling(), 0, 1)
        assert layout.frames.size_px == (rows * theirs.patch_size, columns * theirs.patch_size)


@of_qwen
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"temporal_patch_size": 3}, "video processor's temporal_patch_size is 3, the model's is 2"),
        ({"resample": 2}, "video processor's resample is 2, only 3 is supported"),
        ({"num_frames": 8}, "video processor's num_frames is 8, only None is supported"),
    ],
)
def test_unsupported_settings_refuse_to_start(
    tmp_path: Path, family_checkpoint: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(StartupError, match=named):
        loaded_with(tmp_path, family_checkpoint, video_preprocessor_config=changes)


# --- of one family -------------------------------------------------------------------------------------------------


def test_missing_settings_of_cosmos_take_the_defaults_of_its_own_classes(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    none = {"preprocessor_config": None, "video_preprocessor_config": None}
    folder = with_settings(checkpoints("cosmos3_edge"), tmp_path / "copy", **none)
    held = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "cap_pixels_per_frame": True}  # which is Qwen's alone
    for kind in none:
        (folder / f"{kind}.json").write_text(json.dumps(held))
    found: Any = load_family(Checkpoint(folder))
    image, video = Cosmos3EdgeImageProcessorPil, transformers_video_processor("cosmos3_edge")
    assert (found.image_budget.min_px, found.image_budget.max_px) == tuple(image.size.values())
    assert (found.video_budget.min_px, found.video_budget.max_px) == tuple(video.size.values())
    expected = transformers_video_size(9, 720, 1280, found.token_px, *video.size.values(), None, "cosmos3_edge")
    assert found.video_size(720, 1280, 9, FrameSampling()) == expected
    bounds = found.frame_bounds
    assert (bounds.fps, bounds.min_frames, bounds.max_frames) == (video.fps, video.min_frames, video.max_frames)
    assert (bounds.temporal_patch, found.token_px) == (1, video.patch_size * video.merge_size)


@pytest.mark.parametrize("family", ["glm4v", "glm46v"], indirect=True)
def test_a_request_says_how_many_frames(loaded: Any) -> None:
    """Also of GLM-4.6V, whose processor has no setting for it."""
    bounds = loaded.frame_bounds
    assert len(loaded.sample_indices(3000, Fraction(30), bounds.merged(FrameSampling(num_frames=7)))) == 7
    assert len(loaded.sample_indices(3000, Fraction(30), bounds.merged(FrameSampling(max_frames=9)))) == 9
    assert len(loaded.sample_indices(3000, Fraction(30), bounds.merged(FrameSampling(fps=0.1)))) == 10


@pytest.mark.parametrize(("name", "is_new"), [("Glm46V", True), ("Glm4v", False), (None, False)])
def test_the_processors_and_not_the_model_type_tell_glm_4_6v_from_4_1v(
    checkpoints: Callable[[str], Path], tmp_path: Path, name: str | None, is_new: bool
) -> None:
    """GLM-4.6V-Flash is published with the model type of 4.1V."""
    named = {"processor_class": f"{name}Processor" if name else None}
    named |= dict.fromkeys(("image_processor_type", "video_processor_type"))
    files = {"preprocessor_config": named, "video_preprocessor_config": named}
    assert isinstance(loaded_with(tmp_path, checkpoints("glm4v"), **files), Glm46V) == is_new


def test_an_image_of_video_llama_3_has_a_token_for_each_patch_and_each_frame_follows_its_time(
    checkpoints: Callable[[str], Path],
) -> None:
    folder = checkpoints("video_llama_3")
    plan = plan_of(folder, image(picture(70, 40)), video(clip(35, rate=10), fps=2), "What?")
    shown, moving = plan.media
    height, width = shown.frames.size_px
    assert (shown.grid.h, shown.grid.w) == (height // 14, width // 14)
    assert (moving.grid.h * 28, moving.grid.w * 28) == moving.frames.size_px
    assert [run.length for run in moving.runs] == [moving.grid.slice_tokens] * 7
    made = transformers_processor("video_llama_3", 1, 1)
    written = made.replace_image_token({"image_grid_thw": torch.tensor([[1, shown.grid.h, shown.grid.w]])}, 0)
    metadata = VideoMetadata(35, fps=10, frames_indices=list(range(0, 35, 5)))
    moved = made.replace_video_token(
        {
            "video_grid_thw": torch.tensor([[7, 2 * moving.grid.h, 2 * moving.grid.w]]),
            "video_merge_sizes": torch.tensor([2]),
            "video_compression_mask": torch.ones(moving.grid.tokens, dtype=torch.bool),
            "video_metadata": [metadata],
        },
        0,
    )
    assert plan.input_ids.tolist() == ids_of(folder, f"{written}{moved}What?")
