"""LLaVA-OneVision's, LLaVA-NeXT-Video's and InternVL's tiles, squares and videos are those of transformers'
processors, as are their tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image
from transformers import LlavaOnevisionConfig
from transformers.image_processing_utils import select_best_resolution
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next_video.processing_llava_next_video import LlavaNextVideoProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.modeling_llava_onevision import unpad_image
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest, StartupError
from gridsieve.common.contract.plan import Grid, PromptPlan
from gridsieve.families.llava.anyres import AnyRes
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.planner import Planner
from tests.families import NEWLINE_ID, NEXT_VIDEO_PX, ONEVISION_PATCH, ONEVISION_PX
from tests.families.ovis2 import INDICATORS, PAD
from tests.media import picture
from tests.preprocessing.planning import (
    ROUNDING,
    ids_of,
    image,
    plan_of,
    rgb,
    sent_of,
    tokenizer_of,
    video,
    with_settings,
)
from tests.preprocessing.preprocessing_media import clip, decoded_in_order

SIDE = ONEVISION_PX // ONEVISION_PATCH
# Width and height: of one tile, several, more than remain, and with padding on either side.
SIZES = [(46, 46), (31, 30), (50, 60), (300, 90), (400, 380)]


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("llava_onevision")


@pytest.fixture(scope="module")
def planner(folder: Path) -> Planner:
    return Planner(Checkpoint(folder), None)


def processor(folder: Path) -> Any:
    """The part of transformers' processor that writes the text of media."""
    made = object.__new__(LlavaOnevisionProcessor)
    made.image_processor = LlavaOnevisionImageProcessorPil.from_pretrained(folder)
    made.num_image_tokens, made.vision_aspect_ratio = SIDE**2, "anyres_max_2"
    made.image_token, made.video_token, made.vision_feature_select_strategy = "<image>", "<video>", "full"
    return made


AS_LEVELS: Any = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}


def assert_near(frames: NDArray[np.uint8], theirs: Any, upright: bool) -> None:
    """Of some upright pictures Pillow computes columns first, unlike torch: a few pixels differ more."""
    assert (np.abs(frames.astype(int) - theirs) > ROUNDING).mean() < (0.001 if upright else 1e-9)


def ids_without_newlines(plan: PromptPlan) -> list[int]:
    """The ids as a processor has them, for which a newline is one more token of its item."""
    ids: list[int] = plan.input_ids.tolist()
    return [ids[place - 1] if token == NEWLINE_ID else token for place, token in enumerate(ids)]


def newlines_of_tiles(plan: PromptPlan, whole: int) -> list[int]:
    """Where newlines of tiled images are. whole: tokens of a whole picture, which precede the rows of its tiles."""
    places: list[int] = []
    for item in plan.media:
        rows = len(item.runs) - 1
        columns, first = (item.grid.tokens - whole) // rows, item.runs[0].offset + whole
        places += [first + row * (columns + 1) + columns for row in range(rows)]
    return places


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_frames_and_tokens_of_images_are_those_of_the_processor(
    planner: Planner, folder: Path, width: int, height: int, alone: bool
) -> None:
    datas = [picture(width, height)] if alone else [picture(width, height), picture(40, 30, seed=1)]
    plan, sent = sent_of(planner, *map(image, datas), "What?")
    made = processor(folder)
    expected = made.image_processor([[rgb(data) for data in datas]], **AS_LEVELS)
    for index, (slices, item) in enumerate(zip(sent, plan.media, strict=True)):
        frames = np.concatenate(slices)
        theirs = expected["pixel_values"][index][: len(frames)].transpose(0, 2, 3, 1)
        assert_near(frames, theirs, height > width)
        assert item.file.source_px[::-1] == Image.open(BytesIO(datas[index])).size
    written = [made.replace_image_token(expected, index) for index in range(len(datas))]
    assert ids_without_newlines(plan) == ids_of(folder, f"{''.join(written)}What?")
    behind = [item.runs[0].end for item in plan.media]
    newlines = np.flatnonzero(plan.input_ids == NEWLINE_ID).tolist()
    assert newlines == (newlines_of_tiles(plan, SIDE**2) if alone else behind)
    if alone:  # those beyond ours pad a batch
        assert len(expected["pixel_values"][0]) == len(sent[0]) > 1
    assert plan.positions.tolist() == [list(range(plan.tokens))] * 3


def test_a_video_has_a_frame_a_second_of_pooled_tokens_and_one_newline(planner: Planner, folder: Path) -> None:
    data = clip(50, rate=10)
    plan, [sent] = sent_of(planner, video(data), "What?")
    (item,) = plan.media
    assert item.timestamps_s == (0.0, 1.0, 2.0, 3.0, 4.0)
    shown = decoded_in_order(data)
    for [frame], index in zip(sent, (0, 10, 20, 30, 40), strict=True):
        resized = Image.fromarray(shown[index]).resize((ONEVISION_PX, ONEVISION_PX), Image.Resampling.BICUBIC)
        assert np.abs(frame.astype(int) - np.array(resized)).max() <= ROUNDING
    frames = np.zeros((5, 3, ONEVISION_PX, ONEVISION_PX))
    written = processor(folder).replace_video_token({"pixel_values_videos": [frames]}, 0)
    assert ids_without_newlines(plan) == ids_of(folder, f"{written}What?")
    (run,) = item.runs
    assert run.length == item.grid.tokens == 5 * math.ceil(SIDE / 2) ** 2
    assert np.flatnonzero(plan.input_ids == NEWLINE_ID).tolist() == [run.end]


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_llava_next_video_tiles_every_image(checkpoints: Callable[[str], Path], width: int, height: int) -> None:
    folder = checkpoints("llava_next_video")
    datas = [picture(width, height), picture(40, 30, seed=1)]
    plan, sent = sent_of(folder, *map(image, datas), "What?")
    made = next_video(folder)
    expected = made.image_processor(list(map(rgb, datas)), **AS_LEVELS)
    for frames, sent_by_theirs in zip(sent, expected["pixel_values"], strict=True):
        theirs = sent_by_theirs[: len(frames)].transpose(0, 2, 3, 1)
        assert_near(np.concatenate(frames), theirs, height > width)
    written = [made.replace_image_token(expected, index) for index in range(len(datas))]
    assert ids_without_newlines(plan) == ids_of(folder, f"{''.join(written)}What?")
    newlines = np.flatnonzero(plan.input_ids == NEWLINE_ID).tolist()
    assert newlines == newlines_of_tiles(plan, (NEXT_VIDEO_PX // 14) ** 2)


def next_video(folder: Path) -> Any:
    """The part of transformers' processor that writes the text of media."""
    made = object.__new__(LlavaNextVideoProcessor)
    made.image_processor = LlavaNextImageProcessorPil.from_pretrained(folder)
    made.patch_size, made.num_additional_image_tokens, made.vision_feature_select_strategy = 14, 1, "default"
    made.image_token, made.video_token = "<image>", "<video>"
    return made


def test_the_centre_of_llava_next_videos_frames_is_sent(checkpoints: Callable[[str], Path]) -> None:
    folder, data = checkpoints("llava_next_video"), clip(30, rate=10)
    plan, [sent] = sent_of(folder, video(data), "What?")
    (item,) = plan.media
    assert item.timestamps_s == (0.0, 1.0, 2.0)
    assert (item.grid.t, item.grid.h, item.grid.w, len(item.runs)) == (3, 2, 2, 1)
    frames = np.zeros((3, 3, NEXT_VIDEO_PX, NEXT_VIDEO_PX))
    written = next_video(folder).replace_video_token({"pixel_values_videos": [frames]}, 0)
    assert plan.input_ids.tolist() == ids_of(folder, f"{written}What?")
    centre = CLIPImageProcessorPil.from_pretrained(folder)  # as its video processor, which needs torchvision
    shown = [decoded_in_order(data)[index] for index in (0, 10, 20)]
    expected = centre(shown, **AS_LEVELS)["pixel_values"]
    assert np.abs(np.concatenate(sent).astype(int) - expected.transpose(0, 2, 3, 1)).max() <= ROUNDING


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_internvl_tiles_an_image_by_its_shape(checkpoints: Callable[[str], Path], width: int, height: int) -> None:
    folder = checkpoints("internvl")
    data = picture(width, height)
    plan, [slices] = sent_of(folder, image(data), "What?")
    frames, (item,) = np.concatenate(slices), plan.media
    made = GotOcr2ImageProcessorPil.from_pretrained(folder)
    expected = made(rgb(data), crop_to_patches=True, **AS_LEVELS)
    theirs = expected["pixel_values"].transpose(0, 2, 3, 1)
    assert len(frames) == len(theirs) == expected["num_patches"][0] == item.frames.count
    assert_near(frames, theirs, height > width)
    assert plan.input_ids.tolist() == ids_of(folder, f"{internvl().replace_image_token(expected, 0)}What?")


@pytest.mark.parametrize("name", ["internvl", "llava_next_video", "llava_onevision"])
def test_a_rate_in_the_processors_file_is_how_densely_videos_are_sampled(
    checkpoints: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """A number of frames is refused by its name."""
    own = (checkpoints(name) / "video_preprocessor_config.json").exists()
    kind = "video_preprocessor_config" if own else "preprocessor_config"
    folder = with_settings(checkpoints(name), tmp_path / "fps", **{kind: {"fps": 0.5}})
    family = load_family(Checkpoint(folder))
    # Five frames of ten seconds, as `sample_frames` of transformers spreads them: InternVL's from a share's middle.
    expected = torch.arange(24 if name == "internvl" else 0, 240, 240 / 5).int().tolist()
    assert list(family.sample_indices(240, Fraction(24), family.frame_bounds)) == expected
    folder = with_settings(checkpoints(name), tmp_path / "frames", **{kind: {"num_frames": 8}})
    with pytest.raises(StartupError, match="the video processor's num_frames is 8, only None is supported"):
        load_family(Checkpoint(folder))


@pytest.mark.parametrize("name", ["internvl", "internvl_qwen3"])
def test_internvl_numbers_the_frames_of_a_video(checkpoints: Callable[[str], Path], name: str) -> None:
    """They have the tower's size; 3.5's published video processor has another one."""
    folder = checkpoints(name)
    plan = plan_of(folder, "Here and", video(clip(35, rate=10)), "What?")
    (item,) = plan.media
    indices = torch.arange(35 / 3 / 2, 35, 35 / 3).int()  # of InternVLVideoProcessor.sample_frames
    assert item.timestamps_s == pytest.approx((indices / 10).tolist())
    written = internvl().replace_video_token({"pixel_values_videos": [np.zeros((3, 3, 56, 56))]}, 0)
    assert plan.input_ids.tolist() == ids_of(folder, f"Here and{written}What?")
    assert (len(item.runs), item.frames.size_px) == (3, (56, 56))


def internvl() -> Any:
    """The part of transformers' processor that writes the text of media."""
    made = object.__new__(InternVLProcessor)
    made.start_image_token, made.end_image_token, made.image_token = "<img>", "</img>", "<IMG_CONTEXT>"
    made.image_seq_length = 4
    return made


PUBLISHED = LlavaOnevisionConfig()
PUBLISHED_ANYRES = AnyRes.of(PUBLISHED.to_dict(), 9)


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_tiles_of_every_size_are_those_of_transformers(height: int, width: int) -> None:
    """With the resolutions of published checkpoints."""
    if max(height, width) > 200 * min(height, width):
        return
    tiles = PUBLISHED_ANYRES.tiles(height, width)
    pinpoints = PUBLISHED.image_grid_pinpoints
    assert (384 * tiles.rows, 384 * tiles.columns) == tuple(select_best_resolution((height, width), pinpoints))
    grid = torch.empty(1, 27 * tiles.rows, 27 * tiles.columns)
    assert tiles.unpadded == tuple(unpad_image(grid, (height, width)).shape[1:])
    counting = object.__new__(LlavaOnevisionProcessor)
    counting.image_processor = SimpleNamespace(image_grid_pinpoints=pinpoints)
    counting.num_image_tokens, counting.vision_aspect_ratio = 729, "anyres_max_9"
    rows, columns = tiles.shrunk
    assert 729 + rows * columns + rows == counting._get_number_of_features(height, width, 384, 384)


# What Ovis2's and SmolVLM's processors write of images. A tile has four tokens.
MARKS = {"ovis2": (PAD, *INDICATORS), "smolvlm": ("<row_1_col_1>", "<global-img>", "<image>")}


@pytest.mark.parametrize("name", MARKS)
def test_a_caller_cannot_write_the_marks_of_tiles(checkpoints: Callable[[str], Path], name: str) -> None:
    tokenizer = tokenizer_of(checkpoints(name))
    ids = plan_of(checkpoints(name), "".join(MARKS[name])).input_ids.tolist()
    assert not set(tokenizer.convert_tokens_to_ids(list(MARKS[name]))) & set(ids)
    assert max(ids) < len(tokenizer)  # where the ids of stored vectors begin


@pytest.mark.parametrize("name", MARKS)
def test_embeddings_of_an_image_have_the_text_of_its_tiles(checkpoints: Callable[[str], Path], name: str) -> None:
    planner = Planner(Checkpoint(checkpoints(name)), None)
    (item,), family = plan_of(planner, image(picture(300, 90)), "What?").media, planner._family
    laid = family.image(90, 300, image(b"").sampling, 0, 1)
    assert item.frames.tile_columns > 0
    assert family.embedded_image(item.grid, item.frames.tile_columns, 0) == laid.expansion
    for grid, columns, field in (
        (Grid(1, 4, 4), 2, "tile_columns"),
        (Grid(1, 4, 3), 3, "grid.w"),
        (Grid(1, 3, 3), 0, "grid"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            family.embedded_image(grid, columns, 0)
        assert refused.value.field == f"embeds.{field}"
