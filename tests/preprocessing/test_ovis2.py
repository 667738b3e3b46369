"""Ovis2's tiles and tokens are those of transformers' processor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil, get_min_tile_covering_grid
from transformers.models.ovis2.processing_ovis2 import Ovis2Processor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.planner import Planner
from tests.families.ovis2 import FIRST_ID, INDICATORS, SIDE_PX, TOKENS
from tests.media import picture
from tests.preprocessing import planning
from tests.preprocessing.planning import ROUNDING, image, plan_of, sent_of, with_settings

# Width and height: of one tile, wide, tall, and both.
SIZES = [(56, 56), (300, 90), (90, 300), (130, 120)]
LEVELS: Any = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("ovis2")


@pytest.fixture(scope="module")
def planner(folder: Path) -> Planner:
    return Planner(Checkpoint(folder), None)


def written(images: Any, index: int) -> str:
    """What transformers' processor writes for an image."""
    made = object.__new__(Ovis2Processor)
    made.image_seq_length = TOKENS
    return made.replace_image_token(images, index)


def ids_of(folder: Path, text: str) -> list[int]:
    """The ids of a user's turn, of which those of the processor's marks are the stored vectors'."""
    tokenizer = planning.tokenizer_of(folder)
    ours = {tokenizer.convert_tokens_to_ids(name): FIRST_ID + number for number, name in enumerate(INDICATORS)}
    return [ours.get(each, each) for each in planning.ids_of(folder, text)]


@pytest.mark.parametrize("tiled", [True, False])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_tiles_and_tokens_of_an_image_are_those_of_the_processor(
    folder: Path, tmp_path: Path, width: int, height: int, tiled: bool
) -> None:
    if not tiled:
        folder = with_settings(folder, tmp_path, preprocessor_config={"crop_to_patches": False})
    data = picture(width, height)
    plan, [slices] = sent_of(folder, image(data), "What?")
    expected = Ovis2ImageProcessorPil.from_pretrained(folder)([Image.open(BytesIO(data))], **LEVELS)
    sent, theirs = np.concatenate(slices), np.stack(list(expected["pixel_values"])).transpose(0, 2, 3, 1)
    assert len(sent) == len(theirs) == plan.media[0].frames.count
    assert (np.abs(sent.astype(int) - theirs) > ROUNDING).mean() < (0.01 if height > width else 1e-9)
    assert plan.input_ids.tolist() == ids_of(folder, f"{written(expected, 0)}What?")
    assert plan.positions.tolist() == [list(range(plan.tokens))] * 3


def test_several_images_and_text_have_the_ids_of_the_processor(planner: Planner, folder: Path) -> None:
    datas = [picture(300, 90), picture(40, 60, seed=1)]
    plan = plan_of(planner, "Compare ", image(datas[0]), " and ", image(datas[1]), "What?")
    expected = Ovis2ImageProcessorPil.from_pretrained(folder)([Image.open(BytesIO(each)) for each in datas], **LEVELS)
    first, second = (written(expected, index) for index in (0, 1))
    assert plan.input_ids.tolist() == ids_of(folder, f"Compare {first} and {second}What?")


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 12))
@example(height=1, width=200, most=12)
def test_any_picture_has_the_tiles_of_the_processor(planner: Planner, height: int, width: int, most: int) -> None:
    family: Any = planner._family
    theirs = get_min_tile_covering_grid((height, width), SIDE_PX, most)
    assert replace(family, max_tiles=most)._tiles(height, width) == theirs


@pytest.mark.parametrize(
    ("file", "settings", "named"),
    [
        ("preprocessor_config", {"use_covering_area_grid": False}, "use_covering_area_grid is False, only True"),
        ("preprocessor_config", {"size": {"height": 50, "width": 50}}, "vision_config's 56"),
        ("processor_config", {"image_seq_length": 9}, "image_seq_length is 9, the tower makes 4 tokens"),
        ("config", {"visual_indicator_token_ids": [1, 2, 3, 4, 5]}, "are not the ids of <IMG_START>, <IMG_GRID>"),
    ],
)
def test_unsupported_settings_refuse_to_start(
    folder: Path, tmp_path: Path, file: str, settings: Any, named: str
) -> None:
    with pytest.raises(StartupError, match=named):
        load_family(Checkpoint(with_settings(folder, tmp_path, **{file: settings})))
