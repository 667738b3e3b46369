"""Nemotron Nano 12B v2 VL's text, tiles and frames are those of vLLM's processor, of which constants are here."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.common.contract.plan import Grid
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.planner import PlannedPrompt
from gridsieve.services.preprocessing.video.sampling import FrameBounds, FrameSampling
from tests.families import nemotron_nano
from tests.families.nemotron_nano import SIDE_PX
from tests.media import picture
from tests.preprocessing.planning import ids_of, image, planned, rgb, video, with_settings
from tests.preprocessing.preprocessing_media import clip, decoded_in_order

ROUNDING = 1e-2  # of levels, between sums of float32 in another order
ONE = "<image>" * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemotron_nano")
    nemotron_nano.write(folder, 7)
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Any:
    return load_family(Checkpoint(folder))


# Width and height, and columns and rows of at most 12 tiles of 512 pixels, by
# calculate_internvl_targets(target_ratios=get_internvl_target_ratios(1, 12), image_size=512, …) of vLLM 0.32.
# Of the last two, the checkpoint's own processor was measured to make 11 and 7 tiles, the whole included.
TILES = [
    ((640, 480), (4, 3)),
    ((1920, 1080), (4, 2)),
    ((300, 200), (3, 2)),
    ((512, 512), (1, 1)),
    ((1000, 250), (4, 1)),
    ((90, 800), (1, 9)),
    ((3000, 3000), (3, 3)),
    ((333, 777), (2, 5)),
    ((481, 202), (5, 2)),
    ((1178, 1779), (2, 3)),
]


@pytest.mark.parametrize(("size", "tiles"), TILES, ids=str)
def test_a_picture_has_the_tiles_that_vllm_gives_it(loaded: Any, size: tuple[int, int], tiles: tuple[int, int]) -> None:
    family = replace(loaded, side_px=512, tiles=(1, 12))
    (width, height), (columns, rows) = size, tiles
    laid = family.image(height, width, FrameSampling(), 0, 1)
    count = columns * rows + (columns * rows > 1)
    assert (laid.frames.count, laid.frames.size_px, laid.grid.tokens) == (count, (512, 512), 256 * count)


def resized(frames: NDArray[np.uint8], height: int, width: int) -> Tensor:
    """(F, 3, height, width), as vLLM's processor does."""
    planes = torch.from_numpy(frames).movedim(-1, 1).float()
    return F.interpolate(planes, (height, width), mode="bicubic", align_corners=False, antialias=True)


def check_sent(made: PlannedPrompt, expected: Tensor) -> None:
    """Whether the frames of the one item are these (F, 3, H, W), unrounded."""
    sent = np.concatenate([each.pixels for each in made.media[0].slices()])
    assert sent.dtype == np.float32
    torch.testing.assert_close(torch.from_numpy(sent).movedim(-1, 1), expected, atol=ROUNDING, rtol=0)


def test_an_image_is_sent_in_tiles_row_by_row_and_as_a_whole(folder: Path) -> None:
    data = picture(200, 130)
    made = planned(folder, image(data), "What?")
    pixels = rgb(data)[None]
    cut = resized(pixels, 2 * SIDE_PX, 3 * SIDE_PX).unfold(2, SIDE_PX, SIDE_PX).unfold(3, SIDE_PX, SIDE_PX)
    tiles = cut.permute(0, 2, 3, 1, 4, 5).flatten(0, 2)
    check_sent(made, torch.cat([tiles, resized(pixels, SIDE_PX, SIDE_PX)]))
    assert made.plan.input_ids.tolist() == ids_of(folder, f"<img>{7 * ONE}</img>What?")
    assert made.plan.media[0].grid == Grid(1, 1, 7 * 4)


def test_frames_of_a_video_follow_their_times(folder: Path) -> None:
    """Times as `NanoNemotronVLProcessor` of vLLM 0.32 writes them for {"fps": 29.97, "frames_indices": [0, 7, 29]}."""
    data = clip(30, Fraction(30000, 1001), size=(48, 80))
    made = planned(folder, video(data, frame_indices=(0, 7, 29)), "What?")
    taken = np.stack([decoded_in_order(data)[index] for index in (0, 7, 29)])
    check_sent(made, resized(taken, SIDE_PX, SIDE_PX))
    times = ("Frame 1 sampled at 0.00", "Frame 2 sampled at 0.23", "Frame 3 sampled at 0.96")
    shown = "\n".join(f"{time} seconds: <img>{ONE}</img>" for time in times)
    assert made.plan.input_ids.tolist() == ids_of(folder, f"{shown}What?")
    assert made.plan.media[0].grid == Grid(3, 2, 2)


@pytest.mark.parametrize(
    ("frames", "rate", "wish", "expected"),
    [
        (90, Fraction(30), {}, [0, 18, 36, 53, 71, 89]),  # 17.8 apart
        (14, Fraction(7), {"fps": 2.0}, [0, 4, 9, 13]),  # 4.33 apart
        (10, Fraction(30), {}, [0]),
        (3, Fraction(1), {"num_frames": 9}, [0, 1, 2]),
        (100_000, Fraction(30), {"max_frames": 3}, [0, 50_000, 99_999]),  # 49,999.5: halves are rounded to even
    ],
)
def test_frames_are_spread_from_the_first_to_the_last(
    loaded: Any, frames: int, rate: Fraction, wish: dict[str, Any], expected: list[int]
) -> None:
    bounds: FrameBounds = replace(loaded.frame_bounds, **wish)
    assert list(loaded.sample_indices(frames, rate, bounds)) == expected


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"vision_config": {"args": {"min_num_patches": 1024}}}, "min_num_patches 1024 is not supported"),
        ({"vision_config": {"video_target_num_patches": 1024}}, "video_target_num_patches 1024 is not supported"),
        ({"vision_config": {"video_temporal_patch_size": 2}}, "video_temporal_patch_size 2 is not supported"),
        ({"use_thumbnail": False}, "use_thumbnail False is not supported, only true"),
        ({"force_image_size": None}, "config.json lacks force_image_size"),
    ],
    ids=str,
)
def test_other_layouts_of_the_model_type_are_refused(
    folder: Path, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    with pytest.raises(StartupError, match=named):
        load_family(Checkpoint(with_settings(folder, tmp_path, config=change)))
