"""VideoLLaMA 3's frames, sizes and text are those of its processors in transformers, without token compression."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.video_utils import VideoMetadata

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import MediaRejected
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.video.resize import PixelBudget
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from tests.media import picture
from tests.preprocessing.planning import image, plan_of, video
from tests.preprocessing.preprocessing_media import (
    clip,
    transformers_indices,
    transformers_processor,
    transformers_smart_resize,
    transformers_video_size,
)
from tests.preprocessing.test_tiles import ids_of

FAMILY = "video_llama_3"


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints(FAMILY)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return load_family(Checkpoint(folder))


@given(
    frames=st.integers(1, 4000),
    rate=st.sampled_from([Fraction(1), Fraction(24000, 1001), Fraction(30)]),
    fps=st.sampled_from([1.0, 2.0, 23.976]),
    low=st.integers(1, 64),
    high=st.integers(64, 768),
)
def test_indices_equal_those_of_transformers(
    loaded: Any, frames: int, rate: Fraction, fps: float, low: int, high: int
) -> None:
    expected = transformers_indices(frames, float(rate), fps, low, high, FAMILY)
    found = loaded.sample_indices(frames, rate, FrameBounds(fps, low, high, 1))
    assert list(found) == [index for index in expected if index < frames]


@given(
    frames=st.integers(1, 180),
    height=st.integers(1, 3000),
    width=st.integers(1, 3000),
    low=st.sampled_from([28 * 28, 128 * 28 * 28]),
    high=st.sampled_from([768 * 28 * 28, 12845056]),
)
def test_sizes_equal_those_of_transformers(
    loaded: Any, frames: int, height: int, width: int, low: int, high: int
) -> None:
    sized = replace(loaded, video_budget=PixelBudget(28, low, high), image_budget=PixelBudget(14, low, high))
    try:
        expected = transformers_video_size(frames, height, width, 28, low, high, None, FAMILY)
    except ValueError:
        with pytest.raises(MediaRejected, match="at most 200"):
            sized.video_size(height, width, frames, FrameSampling())
        return
    assert sized.video_size(height, width, frames, FrameSampling()) == expected
    size = sized.image(height, width, FrameSampling(), 0, 1).frames.size_px
    assert size == transformers_smart_resize(height, width, 14, low, high)


def test_an_image_has_a_token_for_each_patch_and_each_frame_follows_its_time(folder: Path) -> None:
    plan = plan_of(folder, image(picture(70, 40)), video(clip(35, rate=10), fps=2), "What?")
    shown, moving = plan.media
    height, width = shown.frames.size_px
    assert (shown.grid.h, shown.grid.w) == (height // 14, width // 14)
    assert (moving.grid.h * 28, moving.grid.w * 28) == moving.frames.size_px
    assert [run.length for run in moving.runs] == [moving.grid.slice_tokens] * 7
    made = transformers_processor(FAMILY, 1, 1)
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
    assert plan.input_ids.tolist() == ids_of(folder, written, moved)
