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
from hypothesis import assume, example, given
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoImageProcessor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import MediaRejected, StartupError
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.video.resize import PixelBudget
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from tests.families import FAMILIES
from tests.preprocessing.preprocessing_media import (
    transformers_indices,
    transformers_smart_resize,
    transformers_video_processor,
    transformers_video_size,
)

RATES = [Fraction(1), Fraction(10), Fraction(24000, 1001), Fraction(25), Fraction(30), Fraction(30000, 1001)]


@pytest.fixture(scope="module")
def loaded(family_checkpoint: Path) -> Any:
    return load_family(Checkpoint(family_checkpoint))


@given(
    frames=st.integers(2, 4000) | st.integers(2, 3_000_000),
    rate=st.sampled_from(RATES) | st.fractions(Fraction(1, 2), 240, max_denominator=1001),
    fps=st.sampled_from([1.0, 2.0, 4.0, 23.976]) | st.floats(0.01, 120),
    low=st.integers(2, 64),
    high=st.integers(2, 768),
)
@example(frames=1195207, rate=Fraction(24000, 1001), fps=2.0, low=4, high=768)  # rounds by lanes of 8
@example(frames=1289433, rate=Fraction(1), fps=1.0, low=2, high=360)  # ends with half a pair of lanes
@example(frames=68, rate=Fraction(24000, 1001), fps=5.622115197626865, low=4, high=768)  # ends after the last frame
def test_indices_equal_those_of_transformers(
    family: str, loaded: Any, frames: int, rate: Fraction, fps: float, low: int, high: int
) -> None:
    expected = transformers_indices(frames, float(rate), fps, low, high, family)
    picked = loaded.sample_indices(frames, rate, FrameBounds(fps, low, high, 2))
    # Rounding sometimes puts Qwen2-VL's last index after the last frame: transformers fails, and it is dropped here.
    assert list(picked) == [index for index in expected if index < frames]


def test_a_video_of_one_frame_yields_that_frame(loaded: Any) -> None:
    assert loaded.sample_indices(1, Fraction(30), FrameBounds(2.0, 4, 768, 2)) == (0,)


@given(
    frames=st.integers(1, 768),
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    low=st.sampled_from([28 * 28, 56 * 56, 4096, 128 * 32 * 32]),
    high=st.sampled_from([112 * 112, 32 * 32 * 768, 12845056, 25165824]),
    max_tokens=st.none() | st.sampled_from([16, 768, 4000, 128_000]),
)
@example(frames=5, height=720, width=1280, low=4096, high=4_000_000, max_tokens=None)  # 5 frames count as 4
@example(frames=1, height=720, width=1280, low=4096, high=25165824, max_tokens=768)
@example(frames=9, height=5, width=900, low=4096, high=25165824, max_tokens=None)  # thinner than a token
def test_video_sizes_equal_those_of_transformers(
    family: str, loaded: Any, frames: int, height: int, width: int, low: int, high: int, max_tokens: int | None
) -> None:
    low = min(low, high)
    token_px = FAMILIES[family].token_px
    capped = replace(loaded, video_budget=PixelBudget(token_px, low, high), max_video_tokens=max_tokens)
    # A single frame is sent as two, because transformers fails for one frame of Qwen3-VL.
    counted = max(frames, 2) if FAMILIES[family].slices_stand_alone else frames
    try:
        expected = transformers_video_size(counted, height, width, token_px, low, high, max_tokens, family)
    except ValueError:
        with pytest.raises(MediaRejected, match="at most 200"):
            capped.video_size(height, width, frames, FrameSampling())
    else:
        assert capped.video_size(height, width, frames, FrameSampling()) == expected


@given(height=st.integers(1, 5000), width=st.integers(1, 5000), max_pixels=st.none() | st.integers(1024, 10**7))
def test_image_sizes_equal_those_of_transformers(
    family: str, loaded: Any, height: int, width: int, max_pixels: int | None
) -> None:
    assume(max(height, width) / min(height, width) <= 200)
    low, high = loaded.image_budget.min_px, max_pixels or loaded.image_budget.max_px
    expected = transformers_smart_resize(height, width, FAMILIES[family].token_px, min(low, high), high)
    assert loaded.image_size(height, width, FrameSampling(max_pixels=max_pixels)) == expected


@given(slices=st.integers(1, 384), max_pixels=st.integers(64 * 64, 10**6))
def test_max_pixels_bounds_each_frame_and_is_used_fully(family: str, loaded: Any, slices: int, max_pixels: int) -> None:
    token_px = FAMILIES[family].token_px
    roomy = replace(loaded, video_budget=PixelBudget(token_px, 4096, 10**9), max_video_tokens=None)
    sides = roomy.video_size(1080, 1920, 2 * slices, FrameSampling(max_pixels=max_pixels))
    exact = [side * math.sqrt(max_pixels / (1080 * 1920)) for side in (1080, 1920)]
    assert sides == tuple(math.floor(side / token_px) * token_px for side in exact)


def loaded_with(folder: Path, original: Path, **files: dict[str, Any] | None) -> Any:
    """The family of a checkpoint with some of its JSON files changed; None leaves one out."""
    for file in original.iterdir():
        changes = files.get(file.stem, {})
        if changes:
            (folder / file.name).write_text(json.dumps(json.loads(file.read_text()) | changes))
        elif changes is not None:
            (folder / file.name).symlink_to(file)
    return load_family(Checkpoint(folder))


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
    file = tmp_path / "preprocessor_config.json"
    for each in checkpoints(name).iterdir():
        (tmp_path / each.name).symlink_to(each)
    held = json.loads(file.read_text())
    file.unlink()
    if not with_size:
        del held["size"]
    for old in ({}, {"max_pixels": 200704}, {"min_pixels": 200704, "max_pixels": 401408}):
        file.write_text(json.dumps(held | old))
        theirs = AutoImageProcessor.from_pretrained(tmp_path)
        rows, columns = theirs(images=[Image.new("RGB", (287, 233))])["image_grid_thw"][0][1:]
        layout = load_family(Checkpoint(tmp_path)).image(233, 287, FrameSampling(), 0, 1)
        assert layout.frames.size_px == (rows * theirs.patch_size, columns * theirs.patch_size)


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
