"""GLM's frames and sizes are those of its processors in transformers, and the processors say which GLM it is."""

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
from gridsieve.families.glm.prompt import Glm46V
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.video.resize import PixelBudget
from gridsieve.services.preprocessing.video.sampling import FrameSampling
from tests.preprocessing.preprocessing_media import (
    transformers_image_size,
    transformers_indices,
    transformers_video_size,
)

TOKEN_PX = 28
RATES = st.sampled_from([Fraction(1), Fraction(10), Fraction(24000, 1001), Fraction(30)])


@pytest.fixture(scope="module", params=["glm4v", "glm46v"])
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def loaded(family_checkpoint: Path) -> Any:
    return load_family(Checkpoint(family_checkpoint))


@given(
    frames=st.integers(1, 400) | st.integers(1, 200_000),
    rate=RATES | st.fractions(Fraction(1, 2), 120, max_denominator=1001),
    fps=st.sampled_from([0.5, 1.0, 2.0, 23.976]) | st.floats(0.1, 60),
)
@example(frames=1, rate=Fraction(30), fps=2.0)
@example(frames=4, rate=Fraction(30), fps=2.0)  # of which GLM-4.6V's processor takes none
@example(frames=9001, rate=Fraction(30), fps=2.0)  # longer than the longest that is sampled at this rate
@example(frames=100, rate=Fraction(1, 20), fps=2.0)  # longer, and fewer frames than are asked for
def test_indices_equal_those_of_transformers(family: str, loaded: Any, frames: int, rate: Fraction, fps: float) -> None:
    bounds = replace(loaded.frame_bounds, max_frames=10**6)
    if family == "glm4v":
        bounds = replace(bounds, fps=fps)
    expected = transformers_indices(frames, float(rate), fps, 0, 0, family)
    assert list(loaded.sample_indices(frames, rate, bounds)) == (expected or [0])


def test_a_request_says_how_many_frames(loaded: Any) -> None:
    """Also of GLM-4.6V, whose processor has no setting for it."""
    bounds = loaded.frame_bounds
    assert len(loaded.sample_indices(3000, Fraction(30), bounds.merged(FrameSampling(num_frames=7)))) == 7
    assert len(loaded.sample_indices(3000, Fraction(30), bounds.merged(FrameSampling(max_frames=9)))) == 9
    assert len(loaded.sample_indices(3000, Fraction(30), bounds.merged(FrameSampling(fps=0.1)))) == 10


@given(
    frames=st.integers(1, 768),
    height=st.integers(1, 5000),
    width=st.integers(1, 5000),
    low=st.sampled_from([28 * 28, 112 * 112, 10**6]),
    high=st.sampled_from([112 * 112, 9633792, 47040000]),
)
@example(frames=1, height=5, width=900, low=12544, high=47040000)  # thinner than a token
def test_sizes_equal_those_of_transformers(
    family: str, loaded: Any, frames: int, height: int, width: int, low: int, high: int
) -> None:
    budget = PixelBudget(TOKEN_PX, min(low, high), high)
    sized = replace(loaded, video_budget=budget, image_budget=budget)
    limits = budget.min_px, budget.max_px
    try:
        video = transformers_video_size(frames, height, width, TOKEN_PX, *limits, None, family)
        image = transformers_image_size(height, width, TOKEN_PX, *limits, family)
    except ValueError:
        with pytest.raises(MediaRejected, match="at most 200"):
            sized.video_size(height, width, frames, FrameSampling())
        with pytest.raises(MediaRejected, match="at most 200"):
            sized.image_size(height, width, FrameSampling())
    else:
        assert sized.video_size(height, width, frames, FrameSampling()) == video
        assert sized.image_size(height, width, FrameSampling()) == image


@pytest.mark.parametrize(("name", "is_new"), [("Glm46V", True), ("Glm4v", False), (None, False)])
def test_the_processors_and_not_the_model_type_tell_glm_4_6v_from_4_1v(
    checkpoints: Callable[[str], Path], tmp_path: Path, name: str | None, is_new: bool
) -> None:
    """GLM-4.6V-Flash is published with the model type of 4.1V."""
    folder = Path(shutil.copytree(checkpoints("glm4v"), tmp_path / "copy"))
    for kind in ("preprocessor_config", "video_preprocessor_config"):
        path = folder / f"{kind}.json"
        settings = {key: value for key, value in json.loads(path.read_text()).items() if "Glm" not in str(value)}
        named = {"processor_class": f"{name}Processor"} if name else {}
        path.write_text(json.dumps(settings | named))
    assert isinstance(load_family(Checkpoint(folder)), Glm46V) == is_new
