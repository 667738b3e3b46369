"""SmolVLM2's squares, frames, sampling and tokens are those of transformers' processors."""

from __future__ import annotations

import ast
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import (
    SmolVLMImageProcessorPil,
    get_resize_output_image_size,
)

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import StartupError
from gridsieve.families.smolvlm.prompt import _in_words
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.planner import Planner
from gridsieve.services.preprocessing.video.sampling import FrameBounds
from tests.families.smolvlm import SIDE_PX, TOKENS
from tests.media import picture
from tests.preprocessing.planning import ROUNDING, image, plan_of, sent_of, tokenizer_of, video, with_settings
from tests.preprocessing.preprocessing_media import clip, decoded_in_order

# Width and height: one square's, wide, tall, one of which the shorter side fills one square, and a strip.
SIZES = [(56, 56), (300, 90), (90, 300), (400, 380), (31, 30), (200, 60), (500, 3)]
LEVELS: Any = {"do_rescale": False, "do_normalize": False, "return_tensors": "np", "return_row_col_info": True}


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("smolvlm")


@pytest.fixture(scope="module")
def planner(folder: Path) -> Planner:
    return Planner(Checkpoint(folder), None)


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of num2words, which is not installed."""
    monkeypatch.setattr(processing_smolvlm, "num2words", lambda number: _in_words(number))


def processor() -> Any:
    """The part of transformers' processor that writes the text of media."""
    made = object.__new__(processing_smolvlm.SmolVLMProcessor)
    made.fake_image_token, made.global_image_token = "<fake_token_around_image>", "<global-img>"
    made.image_token, made.image_seq_len = "<image>", TOKENS
    return made


def ids_of(folder: Path, text: str) -> list[int]:
    """The ids of a question, whose text begins with media or a blank."""
    whole = f"<|im_start|>User:{text}What?<end_of_utterance>\nAssistant:"
    ids: list[int] = tokenizer_of(folder)(whole, add_special_tokens=False)["input_ids"]
    return ids


@pytest.mark.parametrize(
    ("width", "height", "splits"), [*((*size, True) for size in SIZES), *((*size, False) for size in SIZES[:2])]
)
def test_squares_and_tokens_of_an_image_are_those_of_the_processor(
    folder: Path, tmp_path: Path, width: int, height: int, splits: bool
) -> None:
    if not splits:
        folder = with_settings(folder, tmp_path, preprocessor_config={"do_image_splitting": False})
    data = picture(width, height)
    plan, [slices] = sent_of(folder, image(data), "What?")
    expected = SmolVLMImageProcessorPil.from_pretrained(folder)(Image.open(BytesIO(data)), **LEVELS)
    theirs = expected["pixel_values"][0].transpose(0, 2, 3, 1)
    sent, (item,) = np.concatenate(slices), plan.media
    assert len(sent) == len(theirs) == item.frames.count
    assert item.frames.tile_columns == expected["cols"][0][0]
    if len(sent) > 1:  # the whole is sent first
        sent = np.roll(sent, -1, axis=0)
    # Each of two or three steps rounds. Of some upright pictures Pillow computes columns first, unlike torch.
    assert (np.abs(sent.astype(int) - theirs) > 2 * ROUNDING).mean() < (0.01 if height > width else 1e-9)
    assert plan.input_ids.tolist() == ids_of(folder, processor().replace_image_token(expected, 0))
    assert plan.positions.tolist() == [list(range(plan.tokens))] * 3


def test_several_images_and_text_have_the_ids_of_the_processor(planner: Planner, folder: Path) -> None:
    datas = [picture(300, 90), picture(40, 60, seed=1)]
    plan = plan_of(planner, "Compare ", image(datas[0]), " and ", image(datas[1]), "What?")
    expected = SmolVLMImageProcessorPil.from_pretrained(folder)(
        [[Image.open(BytesIO(each)) for each in datas]], **LEVELS
    )
    first, second = (processor().replace_image_token(expected, index) for index in (0, 1))
    assert plan.input_ids.tolist() == ids_of(folder, f" Compare {first} and {second}")


@pytest.mark.parametrize(
    ("frames", "rate", "size"), [(35, 10, (64, 48)), (50, 10, (96, 54)), (9, 10, (48, 96)), (300, 5, (64, 48))]
)
def test_frames_and_tokens_of_a_video_are_those_of_the_processor(
    planner: Planner, folder: Path, frames: int, rate: int, size: tuple[int, int]
) -> None:
    width, height = max(size[0], 64), max(size[1], 48)
    data = clip(frames, rate=rate, size=(height, width))
    plan, [slices] = sent_of(planner, video(data), "What?")
    indices = sampled(frames, float(rate), fps=1.0, most=8)
    (item,) = plan.media
    assert item.timestamps_s == pytest.approx([index / rate for index in indices])
    metadata = transformers.video_utils.VideoMetadata(
        total_num_frames=frames, fps=float(rate), duration=frames / rate, frames_indices=indices
    )
    shape = SimpleNamespace(shape=(1, len(indices), 3, SIDE_PX, SIDE_PX))
    written = processor().replace_video_token({"pixel_values": shape, "video_metadata": [metadata]}, 0)
    assert plan.input_ids.tolist() == ids_of(folder, f" {written}")
    shown = decoded_in_order(data)
    for [frame], index in zip(slices, indices, strict=True):
        theirs = Image.fromarray(shown[index])
        rows, columns = get_resize_output_image_size(np.empty((3, height, width), np.uint8), SIDE_PX)
        for to in ((columns, rows), (SIDE_PX, SIDE_PX)):
            theirs = theirs.resize(to, Image.Resampling.LANCZOS)
        assert (np.abs(frame.astype(int) - np.array(theirs)) > 2 * ROUNDING).mean() < 0.001


@cache
def sample_frames() -> Any:
    """Of transformers' video processor, which cannot be imported without torchvision."""
    path = Path(transformers.__file__).parent / "models/smolvlm/video_processing_smolvlm.py"
    (found,) = (
        each
        for each in ast.walk(ast.parse(path.read_text()))
        if isinstance(each, ast.FunctionDef) and each.name == "sample_frames"
    )
    names: dict[str, Any] = {"np": np}
    exec(compile(ast.Module([found], []), str(path), "exec", flags=annotations.compiler_flag), names)
    return names["sample_frames"]


def sampled(frames: int, rate: float, fps: float, most: int) -> list[int]:
    metadata = transformers.video_utils.VideoMetadata(total_num_frames=frames, fps=rate, duration=frames / rate)
    indices: list[int] = sample_frames()(SimpleNamespace(), metadata, num_frames=most, fps=fps).tolist()
    return indices


@given(
    frames=st.integers(1, 4000) | st.integers(1, 300_000),
    rate=st.sampled_from([Fraction(1), Fraction(25), Fraction(30000, 1001)]) | st.fractions(Fraction(1, 2), 240),
    fps=st.sampled_from([1.0, 2.0, 0.5]) | st.floats(0.1, 120),
    most=st.integers(1, 768),
)
@example(frames=66 * 30 + 1, rate=Fraction(30), fps=1.0, most=64)  # longer than is sampled whole
@example(frames=66 * 30, rate=Fraction(30), fps=1.0, most=64)
def test_indices_are_those_of_transformers(
    planner: Planner, frames: int, rate: Fraction, fps: float, most: int
) -> None:
    bounds = FrameBounds(fps=fps, min_frames=1, max_frames=most, temporal_patch=1)
    found = planner._family.sample_indices(frames, rate, bounds)
    assert list(found) == sampled(frames, float(rate), fps, most)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (13, "thirteen"),
        (64, "sixty-four"),
        (100, "one hundred"),
        (768, "seven hundred and sixty-eight"),
    ],
)
def test_numbers_of_frames_are_spelt(number: int, words: str) -> None:
    assert _in_words(number) == words


def test_a_part_of_a_video_says_how_long_the_whole_is(planner: Planner, folder: Path) -> None:
    ids = plan_of(planner, video(clip(50, rate=10), start_s=2.0), "What?").input_ids.tolist()
    text = tokenizer_of(folder).decode(ids)
    assert "series of three frames from a 0:00:05 [H:MM:SS] video.\n\nFrame from 00:02:" in text


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"resample": 3}, "the image processor's resample is 3, only 1 is supported"),
        ({"max_image_size": {"longest_edge": 50}}, "max_image_size.longest_edge is 50, vision_config's image_size 56"),
        ({"size": {"longest_edge": 5000}}, "size.longest_edge must be at most 4096, got 5000"),
        ({"size": {"height": 10, "width": 10}}, "lacks size.longest_edge"),
    ],
)
def test_unsupported_settings_refuse_to_start(folder: Path, tmp_path: Path, settings: Any, named: str) -> None:
    with pytest.raises(StartupError, match=named):
        load_family(Checkpoint(with_settings(folder, tmp_path, preprocessor_config=settings)))
