"""LLaVA's images are sized, cut out and expanded as by transformers' processors; nothing but images is taken."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from numpy.typing import NDArray
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.pixtral import image_processing_pil_pixtral
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest, MediaRejected, StartupError
from gridsieve.services.preprocessing.conversation import MediaRequest
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.planner import Planner
from tests.families import FAMILIES, LLAVA
from tests.media import picture
from tests.preprocessing.planning import ROUNDING, image, plan_of, rgb, sent_of, tokenizer_of, video, with_settings
from tests.preprocessing.preprocessing_media import clip

with patch.dict(sys.modules, {image_processing_pil_pixtral.__name__.replace("_pil", ""): image_processing_pil_pixtral}):
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor  # without torchvision

PROCESSORS: dict[str, Any] = {
    "llava": CLIPImageProcessorPil,
    "llava_siglip": SiglipImageProcessorPil,
    "llava_pixtral": image_processing_pil_pixtral.PixtralImageProcessorPil,
    "mistral3": image_processing_pil_pixtral.PixtralImageProcessorPil,
}
# Width and height: smaller and larger than every tower's frames, upright and lying, odd, and the frames' own.
SIZES = [(56, 56), (40, 30), (31, 57), (640, 113), (7, 90)]


@pytest.fixture(scope="module", params=LLAVA)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def folder(kind: str, checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints(kind)


@pytest.fixture(scope="module")
def planner(folder: Path) -> Planner:
    return Planner(Checkpoint(folder), None)


@cache
def processor(kind: str, folder: Path) -> Any:
    """transformers' processor of a checkpoint, without torchvision, which it asks for and does not need here."""
    images = PROCESSORS[kind].from_pretrained(folder)
    tokenizer = tokenizer_of(folder)
    pixtral = kind in ("llava_pixtral", "mistral3")
    made = object.__new__(PixtralProcessor if pixtral else LlavaProcessor)
    made.image_processor, made.tokenizer = images, tokenizer
    made.patch_size, made.spatial_merge_size = FAMILIES[kind].patch_px, FAMILIES[kind].merge
    made.image_token = "[IMG]" if pixtral else "<image>"
    made.image_break_token, made.image_end_token = "[IMG_BREAK]", "[IMG_END]"
    made.vision_feature_select_strategy = LLAVA[kind].get("vision_feature_select_strategy", "default")
    made.num_additional_image_tokens = int(kind == "llava")
    return made


def pixels_of(kind: str, folder: Path, data: bytes) -> NDArray[np.uint8]:
    """The pixels that transformers' image processor sends, before they are normalised."""
    options = {"do_rescale": False, "do_normalize": False, "return_tensors": "np"}
    if kind == "mistral3":  # as its processor asks
        options["patch_size"] = FAMILIES[kind].token_px
    made = processor(kind, folder).image_processor(rgb(data), **options)
    found: NDArray[np.uint8] = made["pixel_values"][0].transpose(1, 2, 0)
    return found


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_picture_is_sent_as_the_image_processor_makes_it(
    planner: Planner, kind: str, folder: Path, width: int, height: int
) -> None:
    data = picture(width, height)
    plan, [[[sent]]] = sent_of(planner, image(data), "What?")
    expected = pixels_of(kind, folder, data)
    assert sent.shape == expected.shape == (*plan.media[0].frames.size_px, 3)
    apart = np.abs(sent.astype(int) - expected)
    assert apart.max() <= (0 if (height, width) == expected.shape[:2] else ROUNDING)


OTHERS: list[tuple[str, Any, dict[str, Any]]] = [
    ("llava", LlavaImageProcessorPil, {"image_processor_type": "LlavaImageProcessor", "do_pad": True}),
    (
        "llava_siglip",
        LlavaImageProcessorPil,
        {"image_processor_type": "LlavaImageProcessorPil", "do_pad": True, "do_center_crop": False},
    ),
    ("llava", CLIPImageProcessorPil, {"do_pad": True}),
    ("llava", CLIPImageProcessorPil, {"size": {"height": 70, "width": 51}}),
    ("llava", CLIPImageProcessorPil, {"size": {"height": 56, "width": 56}, "do_center_crop": False}),
]


@pytest.mark.parametrize(("kind", "class_", "settings"), OTHERS, ids=str)
def test_a_picture_is_padded_stretched_and_cropped_as_the_settings_say(
    checkpoints: Callable[[str], Path], tmp_path: Path, kind: str, class_: Any, settings: dict[str, Any]
) -> None:
    folder = with_settings(checkpoints(kind), tmp_path, preprocessor_config=settings)
    planner, made = Planner(Checkpoint(folder), None), class_.from_pretrained(folder)
    for width, height in SIZES:
        data = picture(width, height)
        _, [[[sent]]] = sent_of(planner, image(data), "What?")
        theirs = made(rgb(data), do_rescale=False, do_normalize=False, return_tensors="np")["pixel_values"][0]
        expected = theirs.transpose(1, 2, 0)
        apart = np.abs(sent.astype(int) - expected)
        assert (apart > ROUNDING).mean() < (0.001 if height > width else 1e-9)
        if class_ is LlavaImageProcessorPil and made.do_pad and width != height:
            assert sent[0, 0].tolist() == expected[0, 0].tolist()  # of the colour that is padded with


def test_each_image_expands_as_by_the_processor(planner: Planner, kind: str, folder: Path) -> None:
    datas = [picture(*size) for size in SIZES]
    parts = [part for number, data in enumerate(datas) for part in (image(data), f"Picture {number}. ")]
    plan = plan_of(planner, *parts, "Which?")
    made = processor(kind, folder)
    asked = [*parts, "Which?"]
    content = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in asked]
    messages = [{"role": "user", "content": content}]
    text = made.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, *after = text.split(made.image_token)
    for number, (data, text) in enumerate(zip(datas, after, strict=True)):
        pixels = pixels_of(kind, folder, data).transpose(2, 0, 1)
        inputs = {"pixel_values": {number: pixels}, "image_sizes": {number: pixels.shape[1:]}}
        before += made.replace_image_token(inputs, number) + text
    assert plan.input_ids.tolist() == made.tokenizer(before, add_special_tokens=False)["input_ids"]
    assert plan.positions.tolist() == [list(range(plan.tokens))] * 3
    image_id = made.tokenizer.convert_tokens_to_ids(made.image_token)
    held = [place for item in plan.media for run in item.runs for place in range(run.offset, run.end)]
    assert held == [place for place, token in enumerate(plan.input_ids) if token == image_id]


def test_the_class_token_and_a_dropped_patch_change_the_number_of_tokens(
    checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    for kind, strategy, tokens in (
        ("llava", "default", 16),
        ("llava", "full", 17),
        ("llava_siglip", "default", 15),
        ("llava_siglip", "full", 16),
    ):
        chosen = {"vision_feature_select_strategy": strategy}
        folder = with_settings(checkpoints(kind), tmp_path / (kind + strategy), config=chosen)
        assert plan_of(folder, image(picture(40, 30))).media[0].grid.tokens == tokens


@pytest.mark.parametrize(
    ("request_", "error", "why"),
    [
        (video(clip(4)), InvalidRequest, "video is not supported: this model takes images only"),
        (image(picture(40, 30), max_pixels=1000), InvalidRequest, r"image.frame_sampling.max_pixels must be at least"),
        (image(picture(1, 201)), MediaRejected, "image has 1×201 pixels, an aspect ratio of at most 200"),
    ],
)
def test_what_the_model_cannot_take_is_named(
    checkpoints: Callable[[str], Path], request_: MediaRequest, error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        plan_of(checkpoints("llava"), request_, "What?")


@pytest.mark.parametrize(
    ("kind", "config", "settings", "why"),
    [
        ("llava", {"vision_config": {"model_type": "dinov2"}}, {}, "'dinov2' is not supported"),
        ("llava", {}, {"resample": 2}, "resample is 2, only 3"),
        ("llava", {}, {"crop_size": {"height": 70, "width": 70}}, "vision_config.image_size is 56"),
        ("llava", {}, {"size": {"longest_edge": 56}}, "makes None pixels"),
        ("llava_pixtral", {"vision_feature_select_strategy": "default"}, {}, "select_strategy full"),
        ("llava", {"vision_feature_select_strategy": "class"}, {}, "vision_feature_select_strategy 'class'"),
        ("llava_onevision", {"vision_feature_select_strategy": "class"}, {}, "vision_feature_select_strategy 'class'"),
        ("internvl", {"vision_feature_select_strategy": "class"}, {}, "vision_feature_select_strategy 'class'"),
        ("llava_onevision", {"vision_config": {"image_size": 46}}, {}, "config.json lacks vision_config.patch_size"),
        ("internvl", {"vision_config": {"image_size": [56, 70]}}, {}, r"vision_config.image_size \[56, 70\] is not"),
        ("internvl", {"downsample_ratio": "half"}, {}, "config.json: downsample_ratio must be a number .* 'half'"),
        ("internvl", {}, {"max_patches": 2.5}, "max_patches must be a whole number of at least 1, got 2.5"),
        ("internvl", {}, {"size": "56"}, "preprocessor_config.json: size must be an object, got '56'"),
        ("llava", {}, {"size": {"shortest_edge": [56]}}, r"size.shortest_edge must be a whole number .* got \[56\]"),
        ("video_llama_3", {}, {"size": {"height": 56, "width": 56}}, "lacks size.shortest_edge"),
        ("llava_onevision", {"vision_aspect_ratio": "anyres_max_x"}, {}, "vision_aspect_ratio 'anyres_max_x' is not"),
    ],
)
def test_settings_that_are_malformed_or_contradict_the_tower_are_refused(
    checkpoints: Callable[[str], Path],
    tmp_path: Path,
    kind: str,
    config: dict[str, Any],
    settings: dict[str, Any],
    why: str,
) -> None:
    folder = with_settings(checkpoints(kind), tmp_path, preprocessor_config=settings, config=config)
    with pytest.raises(StartupError, match=why):
        load_family(Checkpoint(folder))


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llava", {"size": 56, "crop_size": [56, 56]}),
        ("internvl", {"size": 56}),
        ("internvl", {"size": [56, 56]}),
        ("internvl", {"min_patches": None, "crop_size": None, "rescale_factor": None}),
    ],
)
def test_sizes_of_older_files_and_nulls_are_read_as_by_transformers(
    checkpoints: Callable[[str], Path], tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    folder = with_settings(checkpoints(kind), tmp_path, preprocessor_config=settings)
    theirs: Any = {"llava": LlavaImageProcessorPil, "internvl": GotOcr2ImageProcessorPil}[kind]
    plain, other = (theirs.from_pretrained(each) for each in (checkpoints(kind), folder))
    assert (plain.size, plain.crop_size) == (other.size, other.crop_size)
    assert load_family(Checkpoint(folder)) == load_family(Checkpoint(checkpoints(kind)))
