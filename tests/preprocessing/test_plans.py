"""Plans of encoded media have the frames, sizes, tokens, runs and positions of transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.plan import Modality, PromptPlan
from gridsieve.services.preprocessing.conversation import MediaRequest
from gridsieve.services.preprocessing.planner import Planner
from tests import media
from tests.families import FAMILIES
from tests.preprocessing.planning import conversation, image, video
from tests.preprocessing.preprocessing_media import (
    HEIGHT_PX,
    WIDTH_PX,
    clip,
    transformers_image_size,
    transformers_indices,
    transformers_processor,
    transformers_video_size,
)

TOKENS_PER_SECOND = 2  # of the tiny checkpoints
# Its frames depend on the video's length alone.
BY_LENGTH = "glm46v"
FILM, NTSC = Fraction(24000, 1001), Fraction(30000, 1001)


@pytest.fixture(
    scope="session",
    params=["qwen2_5_vl", "qwen2_vl", "qwen3_vl", "cosmos3_edge", "glm4v", "glm46v"],
)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@dataclass(frozen=True)
class Picture:
    height: int
    width: int

    @property
    def data(self) -> bytes:
        return media.picture(self.width, self.height)


@dataclass(frozen=True)
class Video:
    """A clip of `frames` at a constant rate, sampled at `fps`. test_variable_rates.py has others."""

    frames: int
    rate: Fraction | int
    fps: float = 2.0

    @cached_property
    def data(self) -> bytes:
        return clip(self.frames, rate=self.rate)

    def metadata(self, family: str) -> SimpleNamespace:
        """Rate and sampled indices for transformers."""
        rate = float(self.rate)
        indices = np.array(transformers_indices(self.frames, rate, self.fps, 4, 768, family))
        return SimpleNamespace(fps=rate, frames_indices=indices, timestamps=[index / rate for index in indices])

    def seconds_per_frame(self, sampled: int) -> Fraction:
        return self.frames / (sampled * Fraction(self.rate))


Part = str | Picture | Video
Message = tuple[str, Sequence[Part]]


@dataclass(frozen=True)
class Expected:
    """What transformers' processor makes of a media item: its frames before padding, their size, and its text."""

    frames: int
    height_px: int
    width_px: int
    text: str


@cache
def tokenizer_of(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


def expected_item(family: str, checkpoint: Path, part: Picture | Video) -> Expected:
    known = FAMILIES[family]
    processor = transformers_processor(family, known.merge, known.temporal_patch)
    kind = "preprocessor_config" if isinstance(part, Picture) else "video_preprocessor_config"
    size = json.loads((checkpoint / f"{kind}.json").read_text())["size"]
    edges = size["shortest_edge"], size["longest_edge"]
    if isinstance(part, Picture):
        height, width = transformers_image_size(part.height, part.width, known.token_px, *edges, family)
        grids = torch.tensor([[1, height // known.patch_px, width // known.patch_px]])
        return Expected(1, height, width, processor.replace_image_token({"image_grid_thw": grids}, 0))
    metadata = part.metadata(family)
    frames = len(metadata.frames_indices)
    height, width = transformers_video_size(frames, HEIGHT_PX, WIDTH_PX, known.token_px, *edges, None, family)
    slices = -(-frames // known.temporal_patch)
    grids = torch.tensor([[slices, height // known.patch_px, width // known.patch_px]])
    text = processor.replace_video_token({"video_grid_thw": grids, "video_metadata": [metadata]}, 0)
    return Expected(frames, height, width, text)


def expected_ids(family: str, checkpoint: Path, messages: Sequence[Message], items: Sequence[Expected]) -> list[int]:
    """What transformers' processor and tokenizer make of the conversation."""
    parts = [part for _, parts in messages for part in parts if not isinstance(part, str)]
    images, videos = (
        [item.text for part, item in zip(parts, items, strict=True) if isinstance(part, kind)]
        for kind in (Picture, Video)
    )
    tokenizer = tokenizer_of(checkpoint)
    kinds = {Picture: "image", Video: "video", str: "text"}
    conversation = [
        {"role": role, "content": [{"type": kinds[type(part)], "text": part} for part in parts]}
        for role, parts in messages
    ]
    rendered = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    (text,), _ = transformers_processor(family, 0, 0).get_text_with_replacements([rendered], images, videos)
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def planned_of(family: str, checkpoint: Path, messages: Sequence[Message]) -> PromptPlan:
    def asked(part: Part) -> str | MediaRequest:
        if isinstance(part, str):
            return part
        if isinstance(part, Picture):
            return image(part.data)
        return video(part.data, fps=None if family == BY_LENGTH else part.fps)

    turns = [(role, [asked(part) for part in parts]) for role, parts in messages]
    return Planner(Checkpoint(checkpoint), None).plan(conversation(*turns)).plan


def rope_index(family: str, checkpoint: Path, plan: PromptPlan) -> list[list[int]]:
    """transformers' positions [3, N] of a plan's ids and grids."""
    model_class = FAMILIES[family].model
    config = model_class.config_class.from_pretrained(checkpoint)
    side = config.vision_config.spatial_merge_size
    name = model_class.__name__.replace("ForConditionalGeneration", "Model")
    inner = vars(import_module(model_class.__module__))[name]
    model = inner.__new__(inner)
    torch.nn.Module.__init__(model)
    model.config = config
    types = torch.zeros(1, plan.tokens, dtype=torch.long)
    for item in plan.media:
        for run in item.runs:
            types[0, run.offset : run.end] = 2 if item.modality is Modality.VIDEO else 1

    def grids(modality: Modality) -> torch.Tensor | None:
        found = [
            (item.grid.t, item.grid.h * side, item.grid.w * side) for item in plan.media if item.modality is modality
        ]
        return torch.tensor(found) if found else None

    seconds = [float(item.seconds_per_grid) for item in plan.media if item.seconds_per_grid]
    positions, _ = model.get_rope_index(
        torch.zeros_like(types),
        mm_token_type_ids=types,
        image_grid_thw=grids(Modality.IMAGE),
        video_grid_thw=grids(Modality.VIDEO),
        second_per_grid_ts=torch.tensor(seconds) if seconds else None,
    )
    found: list[list[int]] = positions[:, 0].tolist()
    return found


def assert_planned_as_by_transformers(family: str, checkpoint: Path, *messages: Message) -> None:
    plan = planned_of(family, checkpoint, messages)
    parts = [part for _, parts in messages for part in parts if not isinstance(part, str)]
    expected = [expected_item(family, checkpoint, part) for part in parts]
    assert plan.input_ids.tolist() == expected_ids(family, checkpoint, messages, expected)
    alone, token_px = FAMILIES[family].slices_stand_alone, FAMILIES[family].token_px
    patch = FAMILIES[family].temporal_patch
    for part, item, its in zip(parts, plan.media, expected, strict=True):
        assert item.frames.size_px == (its.height_px, its.width_px)
        assert (item.grid.h, item.grid.w) == (its.height_px // token_px, its.width_px // token_px)
        slices = item.grid.t if alone else 1
        assert [run.length for run in item.runs] == [item.grid.tokens // slices] * slices
        if isinstance(part, Picture):
            assert (item.grid.t, item.frames.count, item.seconds_per_grid, item.timestamps_s) == (1, 1, None, ())
            continue
        metadata = part.metadata(family)
        shown = metadata.frames_indices / metadata.fps
        assert item.timestamps_s == (*shown, *shown[its.frames - its.frames % patch :])
        assert item.frames.count == patch * item.grid.t == len(item.timestamps_s)
        assert item.seconds_per_grid == patch * part.seconds_per_frame(its.frames)
    # Elsewhere transformers resumes text inside the video once its time exceeds the longer side of a frame.
    steps = [1 if family == "qwen2_vl" else (item.seconds_per_grid or 0) * TOKENS_PER_SECOND for item in plan.media]
    if alone or all(
        (item.grid.t - 1) * step < max(item.grid.h, item.grid.w) for item, step in zip(plan.media, steps, strict=True)
    ):
        assert plan.positions.tolist() == rope_index(family, checkpoint, plan)


RATES = [Video(181, NTSC, fps) for fps in (1.0, 29.97)]
SLICES = [Video(frames, rate, float(rate)) for frames, rate in ((4, 1), (5, FILM), (128, FILM))]


@pytest.mark.parametrize("video", [*RATES, *SLICES], ids=lambda each: f"{each.frames} at {float(each.rate):.2f}")
def test_a_video_is_planned_as_by_transformers(family: str, family_checkpoint: Path, video: Video) -> None:
    assert_planned_as_by_transformers(family, family_checkpoint, ("user", (video, "What moves?")))


SHORT, LONG = Video(30, 30), Video(200, NTSC, 4.0)
WIDE, TALL = Picture(60, 190), Picture(190, 60)
MIXES: dict[str, Sequence[Message]] = {
    "a brief video before an image": [("user", ("so " * 300, Video(8, 8, 8.0), TALL, "Which is it?"))],
    "several videos and images": [("user", (SHORT, WIDE, LONG, "then", Video(77, FILM), TALL, "So?"))],
    "images of many sizes": [("user", (*[Picture(30 + 9 * side, 100) for side in range(9)], "How many?"))],
    "extreme images": [("user", (Picture(1, 1), Picture(300, 20), "and", Picture(1000, 700), "?"))],
    "media in earlier turns": [
        ("system", ("Be brief.",)),
        ("user", (SHORT, TALL, "What moves?")),
        ("assistant", ("A square.",)),
        ("user", (WIDE, "And here?", LONG)),
    ],
}


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_of_media_is_planned_as_by_transformers(family: str, family_checkpoint: Path, mix: str) -> None:
    assert_planned_as_by_transformers(family, family_checkpoint, *MIXES[mix])
