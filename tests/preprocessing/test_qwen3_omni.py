"""Prompts of Qwen3-Omni's thinker have the ids and positions of transformers, whatever is seen and heard, and its
videos a size of their own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3OmniMoeThinkerConfig, WhisperFeatureExtractor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerModel
from transformers.models.qwen3_omni_moe.processing_qwen3_omni_moe import (
    Qwen3OmniMoeProcessor,
    _get_feat_extract_output_lengths,
)

from gridsieve.common.checkpoint import Checkpoint
from gridsieve.common.contract.errors import InvalidRequest
from gridsieve.common.contract.plan import MediaPlan, Modality, PromptPlan
from gridsieve.families.qwen.prompt import Qwen3Omni
from gridsieve.services.preprocessing.layouts.family import load_family
from gridsieve.services.preprocessing.video.resize import PixelBudget
from tests import media
from tests.media import clip, picture
from tests.preprocessing.planning import Part, ids_of, image, plan_of, planned, video
from tests.preprocessing.test_omni import SHAPES, heard, sound

MERGE, PATCH, PER_SECOND = 2, 16, 12
# Slices a second apart, which are 12 positions.
BRIEF, LONG = clip(8, fps=4), clip(24, fps=4, width=160, height=96, seed=1)
PICTURE = picture(112, 64)
MIXES: dict[str, Sequence[Part]] = {
    "a video": (video(LONG, fps=2.0), "What moves?"),
    "a picture": (image(PICTURE), "What is it?"),
    "several": (video(BRIEF, fps=2.0), "and", image(PICTURE), video(LONG, fps=2.0), "then", image(PICTURE), "So?"),
    "a sound": (sound(media.sound(media.chirp(3.4))), "What sounds?"),
    "heard and seen": (
        *(sound(media.sound(media.chirp(0.9))), "then", heard(LONG, 8.0, fps=2.0), image(PICTURE)),
        *("and", heard(BRIEF, 1.2, fps=2.0), heard(LONG, 2.5, fps=2.0), sound(media.sound(media.chirp(0.02))), "So?"),
    ),
}


@pytest.fixture(scope="module")
def folder(checkpoints: Callable[[str], Path]) -> Path:
    return checkpoints("qwen3_omni_moe")


def grids_of(plan: PromptPlan, modality: Modality) -> torch.Tensor | None:
    sides = [
        (each.grid.t, MERGE * each.grid.h, MERGE * each.grid.w) for each in plan.media if each.modality is modality
    ]
    return torch.tensor(sides) if sides else None


def positions_of(folder: Path, plan: PromptPlan) -> torch.Tensor:
    """transformers' positions [3, N] of the ids and grids of a plan."""
    config = Qwen3OmniMoeThinkerConfig.from_pretrained(folder)
    model: Any = Qwen3OmniMoeThinkerModel.__new__(Qwen3OmniMoeThinkerModel)
    torch.nn.Module.__init__(model)
    model.config, model.spatial_merge_size = config, config.vision_config.spatial_merge_size
    ids = torch.from_numpy(plan.input_ids).long()[None]
    lengths = [each.frames.size_px[1] for each in plan.media if each.modality is Modality.AUDIO]
    images, videos = grids_of(plan, Modality.IMAGE), grids_of(plan, Modality.VIDEO)
    positions, _ = model.get_rope_index(
        ids,
        # Of sounds alone it gives no positions; it reads none of these.
        torch.zeros(0, 3) if images is videos is None else images,
        videos,
        torch.ones_like(ids),
        use_audio_in_video=bool(lengths),
        audio_seqlens=torch.tensor(lengths),
        second_per_grids=torch.tensor([float(each.seconds_per_grid) for each in plan.media if each.seconds_per_grid]),
    )
    found: torch.Tensor = positions[:, 0]
    return found


def expanded(parts: Sequence[Part], plan: PromptPlan) -> str:
    """The user's text in which transformers' processor has expanded what stands for media."""
    processor: Any = object.__new__(Qwen3OmniMoeProcessor)
    processor.image_processor = processor.video_processor = SimpleNamespace(merge_size=MERGE)
    processor.image_token, processor.video_token = "<|image_pad|>", "<|video_pad|>"
    processor.audio_token = "<|audio_pad|>"
    processor.audio_bos_token, processor.audio_eos_token = "<|audio_start|>", "<|audio_end|>"

    def sounds(item: MediaPlan) -> dict[str, list[int]]:
        return {"num_audio_tokens": [_get_feat_extract_output_lengths(item.frames.size_px[1])]}

    texts, items = [], iter(plan.media)
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
            continue
        item = next(items)
        grid = item.grid
        if item.modality is Modality.AUDIO:
            texts.append(f"<|audio_start|>{processor.replace_audio_token(sounds(item), 0)}<|audio_end|>")
            continue
        grids = torch.tensor([[grid.t, MERGE * grid.h, MERGE * grid.w]])
        if item.modality is Modality.IMAGE:
            tokens = processor.replace_image_token({"image_grid_thw": grids}, 0)
        elif part.hears:
            clip = {"video_grid_thw": grids.numpy(), "video_second_per_grid": [float(item.seconds_per_grid or 0)]}
            tokens = processor.replace_video_with_audio_token(
                clip, 0, sounds(next(items)), 0, position_id_per_seconds=PER_SECOND
            )
        else:
            tokens = processor.replace_video_token({"video_grid_thw": grids}, 0, load_audio_from_video=False)
        texts.append(f"<|vision_start|>{tokens}<|vision_end|>")
    return "".join(texts)


@pytest.mark.parametrize("mix", MIXES)
def test_ids_and_positions_are_those_of_transformers(folder: Path, mix: str) -> None:
    plan = plan_of(folder, *MIXES[mix])
    assert plan.input_ids.tolist() == ids_of(folder, expanded(MIXES[mix], plan))
    assert plan.positions.tolist() == positions_of(folder, plan).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_each_slice_of_a_clip_is_before_the_sound_of_its_time(folder: Path, shape: str) -> None:
    frames, rate, fps, lasts_s = SHAPES[shape]
    parts = ("so", heard(clip(frames, fps=rate, width=64, height=96), lasts_s, fps=fps, min_frames=1), "What moves?")
    plan = plan_of(folder, *parts)
    assert plan.input_ids.tolist() == ids_of(folder, expanded(parts, plan))
    assert plan.positions.tolist() == positions_of(folder, plan).floor().tolist()


def test_what_is_sent_of_a_sound_are_whispers_features_without_padding(folder: Path) -> None:
    chirp = media.chirp(5.0)
    made = planned(folder, sound(media.sound(chirp)))
    (features,) = made.media[0].slices()
    made.files.close()
    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    expected = extractor(chirp, sampling_rate=16_000, padding=True, truncation=False, return_tensors="np")
    np.testing.assert_allclose(features.pixels[0, :, :, 0], expected["input_features"][0], atol=1e-4)


def test_a_sound_with_more_frames_than_a_plan_takes_is_refused(folder: Path) -> None:
    silence = np.zeros(330 * 16_000, np.float32)
    with pytest.raises(InvalidRequest, match=r"audio lasts 330\.000 s, this model hears at most 327\.68 s"):
        plan_of(folder, sound(media.sound(silence)))


def test_a_slice_between_two_positions_has_the_lower_one(folder: Path) -> None:
    """transformers' positions are fractions then."""
    plan = plan_of(folder, video(LONG, fps=2.5), "What moves?")
    exact = positions_of(folder, plan)
    assert (exact % 1).any()
    assert plan.positions.tolist() == exact.floor().tolist()


def test_videos_have_the_size_of_their_own_processor_and_never_that_of_images(folder: Path, tmp_path: Path) -> None:
    own, without = load_family(Checkpoint(folder)), Path(shutil.copytree(folder, tmp_path / "without"))
    (without / "video_preprocessor_config.json").unlink()
    published = load_family(Checkpoint(without))
    assert isinstance(own, Qwen3Omni)
    assert isinstance(published, Qwen3Omni)
    side = MERGE * PATCH
    size = json.loads((folder / "video_preprocessor_config.json").read_text())["size"]
    assert own.video_budget == PixelBudget(side, size["shortest_edge"], size["longest_edge"])
    of_class = Qwen3OmniMoeProcessor.videos_kwargs["size"]
    assert published.video_budget == PixelBudget(side, of_class["shortest_edge"], of_class["longest_edge"])
    assert published.image_budget == own.image_budget


def test_a_whole_model_is_planned_as_its_thinker_alone(folder: Path, tmp_path: Path) -> None:
    whole = Path(shutil.copytree(folder, tmp_path / "whole"))
    thinker = json.loads((folder / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe", "thinker_config": thinker}))
    family, alone = load_family(Checkpoint(whole)), load_family(Checkpoint(folder))
    assert isinstance(family, Qwen3Omni)
    assert family == alone
    assert family.tokens_per_second == Fraction(12)
