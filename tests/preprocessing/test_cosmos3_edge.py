"""Cosmos 3 Edge's frames and sizes are those of its processors in transformers. test_plans.py has its prompts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import MediaRejected
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.video.resize import PixelBudget
from gridsieve.services.preprocessing.video.sampling import FrameSampling
from tests.preprocessing.preprocessing_media import (
    transformers_image_size,
    transformers_indices,
    transformers_video_processor,
    transformers_video_size,
)

FAMILY, TOKEN_PX = "cosmos3_edge", 32


@pytest.fixture(scope="module")
def loaded(checkpoints: Callable[[str], Path]) -> Any:
    return load_family(Checkpoint(checkpoints(FAMILY)))


@given(
    frames=st.integers(1, 400) | st.integers(1, 200_000),
    rate=st.fractions(Fraction(1, 2), 120, max_denominator=1001),
    fps=st.sampled_from([0.5, 1.0, 2.0, 23.976]) | st.floats(0.1, 60),
)
def test_indices_equal_those_of_transformers(loaded: Any, frames: int, rate: Fraction, fps: float) -> None:
    bounds = replace(loaded.frame_bounds, fps=fps)
    expected = transformers_indices(frames, float(rate), fps, bounds.min_frames, bounds.max_frames, FAMILY)
    assert list(loaded.sample_indices(frames, rate, bounds)) == expected


@given(
    frames=st.integers(1, 768),
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    low=st.sampled_from([64 * 64, 256 * 256, 10**6]),
    high=st.sampled_from([128 * 128, 4096 * 4096, 24 * 1024 * 1024]),
)
@example(frames=1, height=5, width=900, low=65536, high=16777216)  # thinner than a token
def test_sizes_equal_those_of_transformers(
    loaded: Any, frames: int, height: int, width: int, low: int, high: int
) -> None:
    budget = PixelBudget(TOKEN_PX, min(low, high), high)
    sized = replace(loaded, video_budget=budget, image_budget=budget)
    limits = budget.min_px, budget.max_px
    try:
        video = transformers_video_size(frames, height, width, TOKEN_PX, *limits, None, FAMILY)
        image = transformers_image_size(height, width, TOKEN_PX, *limits, FAMILY)
    except ValueError:
        with pytest.raises(MediaRejected, match="at most 200"):
            sized.video_size(height, width, frames, FrameSampling())
        with pytest.raises(MediaRejected, match="at most 200"):
            sized.image_size(height, width, FrameSampling())
    else:
        assert sized.video_size(height, width, frames, FrameSampling()) == video
        assert sized.image_size(height, width, FrameSampling()) == image


def test_missing_settings_take_the_defaults_of_transformers(checkpoints: Callable[[str], Path], tmp_path: Path) -> None:
    from transformers.models.cosmos3_edge.image_processing_pil_cosmos3_edge import Cosmos3EdgeImageProcessorPil

    folder = Path(shutil.copytree(checkpoints(FAMILY), tmp_path / "copy"))
    held = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "cap_pixels_per_frame": True}  # which is Qwen's alone
    for kind in ("preprocessor_config", "video_preprocessor_config"):
        (folder / f"{kind}.json").write_text(json.dumps(held))
    found: Any = load_family(Checkpoint(folder))
    image, video = Cosmos3EdgeImageProcessorPil, transformers_video_processor(FAMILY)
    assert (found.image_budget.min_px, found.image_budget.max_px) == tuple(image.size.values())
    assert (found.video_budget.min_px, found.video_budget.max_px) == tuple(video.size.values())
    expected = transformers_video_size(9, 720, 1280, TOKEN_PX, *video.size.values(), None, FAMILY)
    assert found.video_size(720, 1280, 9, FrameSampling()) == expected
    bounds = found.frame_bounds
    assert (bounds.fps, bounds.min_frames, bounds.max_frames) == (video.fps, video.min_frames, video.max_frames)
    assert (bounds.temporal_patch, found.token_px) == (1, video.patch_size * video.merge_size)
