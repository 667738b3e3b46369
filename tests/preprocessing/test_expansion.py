"""The expanded prompt is that of transformers' own processor, token for token, from encoded media on."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer

from common.checkpoint import Checkpoint
from common.contract.plan import Modality
from services.preprocessing.planner import Conversation, MediaRequest, Planner
from services.preprocessing.prompt.tokens import Turn
from services.preprocessing.video.sampling import FrameSampling
from tests.families import FAMILIES
from tests.preprocessing.preprocessing_media import (
    HEIGHT_PX,
    WIDTH_PX,
    clip,
    transformers_indices,
    transformers_processor,
    transformers_smart_resize,
    transformers_video_size,
)

FILM, NTSC = Fraction(24000, 1001), Fraction(30000, 1001)


@dataclass(frozen=True)
class Picture:
    height: int
    width: int

    @property
    def data(self) -> bytes:
        file = io.BytesIO()
        Image.new("RGB", (self.width, self.height), "green").save(file, "PNG")
        return file.getvalue()


@dataclass(frozen=True)
class Video:
    """A clip: so many frames at a constant rate or, in a time base of milliseconds, at `pts`; looked at with `fps`."""

    frames: int
    rate: Fraction | int
    fps: float = 2.0
    pts: tuple[int, ...] | None = None

    @cached_property
    def data(self) -> bytes:
        if self.pts is None:
            return clip(self.frames, rate=self.rate)
        return clip(self.frames, container="matroska", pts=self.pts, time_base=Fraction(1, 1000))

    @property
    def average_rate(self) -> Fraction:
        if self.pts is None:
            return Fraction(self.rate)
        return Fraction(1000 * self.frames, self.pts[-1] + 1000 // 30)  # of the last, the file says 30 a second

    def metadata(self, family: str) -> SimpleNamespace:
        """Rate and sampled indices for transformers; where the rate varies, milliseconds instead."""
        indices = transformers_indices(self.frames, float(self.average_rate), self.fps, 4, 768, family)
        if self.pts is None:
            return SimpleNamespace(fps=float(self.rate), frames_indices=np.array(indices))
        times = np.array(self.pts)
        shown = [times[times <= 1000 * index / self.average_rate][-1] for index in indices]
        return SimpleNamespace(fps=1000, frames_indices=np.array(shown))


Part = str | Picture | Video
Message = tuple[str, Sequence[Part]]


@cache
def tokenizer_of(checkpoint: Path) -> Any:
    return AutoTokenizer.from_pretrained(checkpoint)


def expected_ids(family: str, checkpoint: Path, messages: Sequence[Message]) -> list[int]:
    """What transformers' processor and tokenizer make of the conversation."""
    known = FAMILIES[family]
    tokenizer = tokenizer_of(checkpoint)
    processor = transformers_processor(family, known.merge, known.temporal_patch)
    images, videos = [], []
    for part in (part for _, parts in messages for part in parts):
        if isinstance(part, Picture):
            height, width = transformers_smart_resize(
                part.height, part.width, known.token_px, *edges(checkpoint, "preprocessor_config.json")
            )
            grids = torch.tensor([[1, height // known.patch_px, width // known.patch_px]])
            images.append(processor.replace_image_token({"image_grid_thw": grids}, 0))
        elif isinstance(part, Video):
            metadata = part.metadata(family)
            height, width = transformers_video_size(
                len(metadata.frames_indices),
                HEIGHT_PX,
                WIDTH_PX,
                known.token_px,
                *edges(checkpoint, "video_preprocessor_config.json"),
                cap=None,
                max_tokens=0,
                family=family,
            )
            slices = -(-len(metadata.frames_indices) // known.temporal_patch)
            grids = torch.tensor([[slices, height // known.patch_px, width // known.patch_px]])
            videos.append(processor.replace_video_token({"video_grid_thw": grids, "video_metadata": [metadata]}, 0))
    rendered = tokenizer.apply_chat_template(
        [{"role": role, "content": [content_of(part) for part in parts]} for role, parts in messages],
        add_generation_prompt=True,
        tokenize=False,
    )
    (text,), _ = processor.get_text_with_replacements([rendered], images, videos)
    ids: list[int] = tokenizer(text)["input_ids"]
    return ids


def content_of(part: Part) -> dict[str, str]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    return {"type": "image" if isinstance(part, Picture) else "video"}


def edges(checkpoint: Path, file: str) -> tuple[int, int]:
    size = json.loads((checkpoint / file).read_text())["size"]
    return size["shortest_edge"], size["longest_edge"]


def planned_ids(checkpoint: Path, messages: Sequence[Message]) -> list[int]:
    media: list[MediaRequest] = []
    turns: list[Turn] = []
    for role, parts in messages:
        held: list[str | Modality] = []
        for part in parts:
            if isinstance(part, str):
                held.append(part)
                continue
            modality = Modality.VIDEO if isinstance(part, Video) else Modality.IMAGE
            wish = FrameSampling(fps=part.fps) if isinstance(part, Video) else FrameSampling()
            media.append(MediaRequest(f"media {len(media)}", modality, part.data, wish))
            held.append(modality)
        turns.append(Turn(role, tuple(held)))
    plan = Planner(Checkpoint(checkpoint), None).plan(Conversation(tuple(turns), tuple(media))).plan
    ids: list[int] = plan.input_ids.tolist()
    return ids


CLIPS = [Video(40, 1), Video(90, 2), Video(150, FILM), Video(181, NTSC)]


@pytest.mark.parametrize("fps", [1.0, 2.0, 23.976, 29.97])
@pytest.mark.parametrize("video", CLIPS, ids=lambda video: f"{video.frames}@{float(video.rate):.2f}")
def test_a_videos_tokens_are_those_of_transformers_at_any_rate(
    family: str, family_checkpoint: Path, video: Video, fps: float
) -> None:
    messages = [("user", (replace(video, fps=fps), "What moves?"))]
    assert planned_ids(family_checkpoint, messages) == expected_ids(family, family_checkpoint, messages)


@pytest.mark.parametrize("slices", [2, 3, 8, 33, 64])
@pytest.mark.parametrize("rate", [1, FILM], ids=str)
def test_a_videos_tokens_are_those_of_transformers_for_2_to_64_slices(
    family: str, family_checkpoint: Path, rate: Fraction | int, slices: int
) -> None:
    for frames in (2 * slices - 1, 2 * slices):
        messages = [("user", (Video(max(4, frames), rate, float(rate)), "What moves?"))]
        found = planned_ids(family_checkpoint, messages)
        assert found == expected_ids(family, family_checkpoint, messages)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("fps", [1.0, 2.0, 29.97])
def test_a_variable_rate_videos_tokens_tell_its_presentation_times(
    family: str, family_checkpoint: Path, seed: int, fps: float
) -> None:
    generator = np.random.default_rng(seed)
    pts = (0, *np.cumsum(generator.choice([10, 33, 40, 150, 400], 119)).tolist())
    video = Video(120, 30, fps, pts)
    messages = [("user", (video, "What moves?"))]
    assert planned_ids(family_checkpoint, messages) == expected_ids(family, family_checkpoint, messages)
    if FAMILIES[family].slices_stand_alone:
        steady = replace(video, pts=None, rate=video.average_rate)
        assert expected_ids(family, family_checkpoint, [("user", (steady, "What moves?"))]) != expected_ids(
            family, family_checkpoint, messages
        )


SHORT, LONG = Video(30, 30), Video(200, NTSC, 4.0)
WIDE, TALL = Picture(60, 190), Picture(190, 60)
MIXES: dict[str, Sequence[Message]] = {
    "no media": [("user", ("What is it?",))],
    "an image before a video": [("user", (WIDE, "and", SHORT, "?"))],
    "a video before an image": [("user", (LONG, TALL, "Which is it?"))],
    "several videos and images": [("user", (SHORT, WIDE, LONG, "then", Video(77, FILM), TALL, "So?"))],
    "twenty images": [("user", (*[Picture(30 + 9 * side, 100) for side in range(20)], "How many?"))],
    "media in earlier turns": [
        ("system", ("Be brief.",)),
        ("user", (SHORT, TALL, "What moves?")),
        ("assistant", ("A square.",)),
        ("user", (WIDE, "And here?", LONG)),
    ],
}


@pytest.mark.parametrize("mix", MIXES)
def test_every_mix_of_media_has_the_tokens_of_transformers(family: str, family_checkpoint: Path, mix: str) -> None:
    assert planned_ids(family_checkpoint, MIXES[mix]) == expected_ids(family, family_checkpoint, MIXES[mix])
